// What the backend computes by kernels of its own. How their arguments look in numpy stands beside their launches.
// Limits are of one launch: addresses travel with it, and it takes 4 KB of arguments; `device.LIMITS` has them from here.

#define MOST_RUNS 64
#define FEW_RUNS 16
#define FOLDED_LEVELS 5
#define MOST_SEGMENTS 48
#define GATHERED_COLUMNS 6
#define COMPARED_COLUMNS 3
#define NEAREST_STEPS 256
#define MOST_PARTS 24
#define FLAGGED_COLUMNS 5
#define MOST_NUMBERS 16
#define NO_RANK 9223372036854775807

typedef unsigned long long u64;
typedef long long i64;

// --- sorted runs: search.py --------------------------------------------------------------------

// How many of an ascending array's entries are less than a value (or, with `equal`, not greater).
__device__ i64 rank_of(u64 value, const u64* entries, i64 size, bool equal) {
  i64 low = 0, high = size;
  while (low < high) {
    i64 middle = low + (high - low) / 2;
    if (entries[middle] < value || (equal && entries[middle] == value)) low = middle + 1; else high = middle;
  }
  return low;
}

// One thread for an entry: the upper half of a row's hash, and its slot. Of so many the row and the slot are given; of the
// others row i is `rows[i]`, or i with `every`, and slots count from the first one on.
extern "C" __global__ void make_entries(
    const u64* hashes, const i64* given_rows, const i64* slots, i64 given, const i64* rows, bool every, i64 first,
    i64 size, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x, own = at - given;
  if (at >= size) return;
  i64 row = own < 0 ? given_rows[at] : every ? own : rows[own];
  out[at] = (hashes[row] & 0xFFFFFFFF00000000u) | (u64)(own < 0 ? slots[at] : first + own);
}

// One thread for an entry: its place is its own among its kind and its rank among the others.
extern "C" __global__ void merge_entries(const u64* first, i64 size, const u64* second, i64 total, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= total) return;
  if (at < size) out[at + rank_of(first[at], second, total - size, false)] = first[at];
  else out[at - size + rank_of(second[at - size], first, size, true)] = second[at - size];
}

// One thread for a prefix, and one for the end; with `more` those of other entries are added.
extern "C" __global__ void begin_prefixes(
    const u64* entries, i64 size, i64 shift, i64 prefixes, const int* others, bool more, int* directory) {
  i64 prefix = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (prefix > prefixes) return;
  int begin = prefix == prefixes ? size : rank_of((u64)prefix << (32 + shift), entries, size, false);
  directory[prefix] = more ? begin + others[prefix] : begin;
}

// --- lookups in them: search.py ----------------------------------------------------------------

struct Run {
  const u64* entries;  // ascending: upper half a hash, lower half a slot
  const i64* times;  // null where entries have none
  const int* directory;  // where each hash prefix begins
  i64 shift;
};
struct Runs { Run run[MOST_RUNS]; };
struct FewRuns {  // beside columns that are compared
  i64 number;
  Run run[FEW_RUNS];
  i64 index[FEW_RUNS];  // which of some indexes each is of
};

// Within [low, high) the first entry of a run not before (or, with `after`, beyond) a hash and a time.
__device__ int bisected(const Run& run, u64 hash, i64 time, int low, int high, bool after) {
  while (low < high) {
    int middle = low + (high - low) / 2;
    u64 other = run.entries[middle] >> 32;
    bool before = other < hash;
    if (other == hash) {
      if (!run.times) before = after;
      else before = after ? run.times[middle] <= time : run.times[middle] < time;
    }
    if (before) low = middle + 1; else high = middle;
  }
  return low;
}

// Where in each run the entries of each probe row begin, and how many there are: one thread for a run and a probe row.
extern "C" __global__ void find(
    Runs runs, i64 size, i64 lookups, const u64* probe_rows, const i64* earliest, const i64* latest,
    int* begins, i64* counts) {
  i64 lookup = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (lookup >= lookups) return;
  const Run& run = runs.run[lookup / size];
  i64 probe_row = lookup % size;
  u64 hash = probe_rows[probe_row] >> 32;
  int low = run.directory[hash >> run.shift], high = run.directory[(hash >> run.shift) + 1];
  int begin = bisected(run, hash, run.times ? earliest[probe_row] : 0, low, high, false);
  int end = bisected(run, hash, run.times ? latest[probe_row] : 0, begin, high, true);
  begins[lookup] = begin;
  counts[lookup] = end - begin;
}

// Where each probe row stands in the first run, which has times: one thread for a probe row.
extern "C" __global__ void bisect_run(
    Runs runs, i64 size, const u64* probe_rows, const i64* times, bool after, i64* positions) {
  i64 probe_row = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (probe_row >= size) return;
  const Run& run = runs.run[0];
  u64 hash = probe_rows[probe_row] >> 32;
  int low = run.directory[hash >> run.shift], high = run.directory[(hash >> run.shift) + 1];
  positions[probe_row] = bisected(run, hash, times[probe_row], low, high, after);
}

// All pairs of slots: one thread for a pair. `ends` has how many pairs there are up to and with each lookup's.
extern "C" __global__ void write_pairs(
    Runs runs, i64 size, i64 lookups, const u64* probe_rows, const int* begins, const i64* ends, i64 total,
    bool by_candidate, i64* pairs) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= total) return;
  i64 low = 0, high = lookups;
  while (low < high) {
    i64 middle = low + (high - low) / 2;
    if (ends[middle] <= at) low = middle + 1; else high = middle;
  }
  i64 before = low ? ends[low - 1] : 0;
  i64 slot = runs.run[low / size].entries[begins[low] + (at - before)] & 0xFFFFFFFFu;
  i64 own = probe_rows[low % size] & 0xFFFFFFFFu;
  pairs[at] = by_candidate ? slot << 32 | own : own << 32 | slot;
}

// --- rows of fixed-width columns: frame.py -----------------------------------------------------

struct Sources {
  i64 starts[MOST_SEGMENTS];  // the first row of each segment
  const unsigned char* data[GATHERED_COLUMNS][MOST_SEGMENTS];
  i64 widths[GATHERED_COLUMNS];  // bytes of a value
  i64 offsets[GATHERED_COLUMNS];  // where a column's values begin in the output
};

// One thread for a row and a column. Of a row that is not there (-1) another one is read. And behind the values one for
// each 32 rows: a bit for each, set where it is there.
extern "C" __global__ void gather_rows(
    Sources from, i64 segments, i64 threads, i64 size, const i64* rows, i64 words, i64 mask_at,
    unsigned char* out) {
  i64 thread = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (thread >= threads) {
    i64 word = thread - threads;
    if (word >= words) return;
    unsigned bits = 0;
#pragma unroll 1
    for (i64 at = 32 * word; at < size && at < 32 * word + 32; ++at)
      if (rows[at] >= 0) bits |= 1u << (at - 32 * word);
    ((unsigned*)(out + mask_at))[word] = bits;
    return;
  }
  i64 column = thread / size, at = thread % size, row = rows[at] < 0 ? 0 : rows[at];
  i64 low = 0, high = segments - 1;
  while (low < high) {
    i64 middle = (low + high + 1) / 2;
    if (from.starts[middle] <= row) low = middle; else high = middle - 1;
  }
  i64 width = from.widths[column];
  const unsigned char* source = from.data[column][low] + (row - from.starts[low]) * width;
  unsigned char* target = out + from.offsets[column] + at * width;
  switch (width) {
    case 1: *target = *source; break;
    case 2: *(short*)target = *(const short*)source; break;
    case 4: *(int*)target = *(const int*)source; break;
    case 8: *(i64*)target = *(const i64*)source; break;
    default: ((i64*)target)[0] = ((const i64*)source)[0], ((i64*)target)[1] = ((const i64*)source)[1];
  }
}

// --- which rows are equal: compare.py ----------------------------------------------------------

struct Rows {
  i64 segments;
  const i64* rows;  // the row that each number stands for, in the lower half; null where the numbers are the rows
  i64 starts[MOST_SEGMENTS];  // the first row of each segment
  const unsigned char* data[COMPARED_COLUMNS][MOST_SEGMENTS];
};

struct Compared {
  i64 columns;
  i64 widths[COMPARED_COLUMNS];  // bytes of a value; negative where it is a float
  Rows one, other;
};

__device__ i64 segment_of(const Rows& in, i64 row) {
  i64 low = 0, high = in.segments - 1;
  while (low < high) {
    i64 middle = (low + high + 1) / 2;
    if (in.starts[middle] <= row) low = middle; else high = middle - 1;
  }
  return low;
}

// NaN equals NaN, and -0 is 0. Floats go by their bits: cupy compiles with -ftz=true, to which subnormal ones are all 0.
__device__ bool same_double(double a, double b) { return a == b || (a != a && b != b); }
__device__ bool same_float(unsigned a, unsigned b) {
  return a == b || (a | b) << 1 == 0 || (a << 1 > 0xff000000u && b << 1 > 0xff000000u);
}

__device__ bool same_value(const unsigned char* a, const unsigned char* b, i64 width) {
  switch (width) {
    case 1: return *a == *b;
    case 2: return *(const short*)a == *(const short*)b;
    case 4: return *(const int*)a == *(const int*)b;
    case 8: return *(const i64*)a == *(const i64*)b;
    case -4: return same_float(*(const unsigned*)a, *(const unsigned*)b);
    case -8: return same_double(*(const double*)a, *(const double*)b);
    default: return ((const i64*)a)[0] == ((const i64*)b)[0] && ((const i64*)a)[1] == ((const i64*)b)[1];
  }
}

__device__ bool same_row(const Compared& by, i64 number, i64 another) {
  if (!by.columns) return true;
  i64 row = by.one.rows ? by.one.rows[number] & 0xFFFFFFFFu : number;
  i64 slot = by.other.rows ? by.other.rows[another] & 0xFFFFFFFFu : another;
  i64 part = segment_of(by.one, row), piece = segment_of(by.other, slot);
  row -= by.one.starts[part];
  slot -= by.other.starts[piece];
  for (i64 column = 0; column < by.columns; ++column) {
    i64 width = by.widths[column], bytes = width < 0 ? -width : width;
    const unsigned char* a = by.one.data[column][part] + row * bytes;
    const unsigned char* b = by.other.data[column][piece] + slot * bytes;
    if (!same_value(a, b, width)) return false;
  }
  return true;
}

__device__ bool is_match(
    const Compared& by, i64 probe_row, i64 slot, const signed char* states, bool all, i64 least, i64 most) {
  return (all || (states[slot] >= least && states[slot] <= most)) && same_row(by, probe_row, slot);
}

// One thread for a pair of rows.
extern "C" __global__ void compare_rows(
    Compared by, i64 size, const i64* rows, const i64* others, const bool* where, bool everywhere, bool* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < size) out[at] = (everywhere || where[at]) && same_row(by, rows[at], others[at]);
}

// One thread for a candidate: a probe row and a slot in one number.
extern "C" __global__ void mark_matches(
    Compared by, i64 size, const i64* pairs, bool by_candidate, const signed char* states, bool all, i64 least,
    i64 most, bool* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 first = pairs[at] >> 32, second = pairs[at] & 0xFFFFFFFFu;
  out[at] = is_match(by, by_candidate ? second : first, by_candidate ? first : second, states, all, least, most);
}

// The same, where no probe row has more than one match.
extern "C" __global__ void put_matches(
    Compared by, i64 size, const i64* pairs, const signed char* states, bool all, i64 least, i64 most, i64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 probe_row = pairs[at] >> 32, slot = pairs[at] & 0xFFFFFFFFu;
  if (is_match(by, probe_row, slot, states, all, least, most)) out[probe_row] = slot;
}

// One thread for an index and a probe row: the one entry of its runs that matches, if no run before had one; -1 for none.
// Its slot, or with `paired` that and the slot of the probe row, which is an entry then, in one number, whose highest bit
// is `side`. Row i is `rows[i]`, or i with `every`.
extern "C" __global__ void sole_in_runs(
    Compared by, FewRuns runs, i64 size, i64 lookups, const u64* hashes, const i64* rows, bool every, bool paired,
    bool side, bool begins, const signed char* states, bool all, i64 least, i64 most, i64* out) {
  i64 lookup = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (lookup >= lookups) return;
  if (!begins && out[lookup] != -1) return;
  i64 index = lookup / size, at = lookup % size, found = -1;
  u64 hash = hashes[every ? at : rows[at]] >> 32;
#pragma unroll 1
  for (i64 number = 0; number < runs.number && found < 0; ++number) {
    if (runs.index[number] != index) continue;
    const Run& run = runs.run[number];
    i64 entries = run.directory[(u64)1 << (32 - run.shift)];
    int low = run.directory[hash >> run.shift], high = run.directory[(hash >> run.shift) + 1];
    for (i64 place = bisected(run, hash, 0, low, high, false); place < entries; ++place) {
      u64 entry = run.entries[place];
      if (entry >> 32 != hash) break;
      if (is_match(by, at, entry & 0xFFFFFFFFu, states, all, least, most)) { found = entry & 0xFFFFFFFFu; break; }
    }
  }
  out[lookup] = paired && found >= 0 ? (u64)side << 63 | found << 32 | (hashes[at] & 0xFFFFFFFFu) : found;
}

// One thread for a row: its hash, the lowest bits of which give way to its position.
extern "C" __global__ void pack_positions(const u64* hashes, i64 size, i64 bits, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < size) out[at] = (hashes[at] >> bits << bits) | (u64)at;
}

// Of such numbers, sorted: positions, and whether a hash begins; or else, in the upper half, whether the row is unlike
// the one before.
extern "C" __global__ void begin_groups(
    Compared by, const u64* packed, i64 size, i64 bits, i64* order, i64* begins) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  u64 lower = ((u64)1 << bits) - 1;
  i64 row = packed[at] & lower;
  order[at] = row;
  if (!at || packed[at] >> bits != packed[at - 1] >> bits) begins[at] = 1;
  else begins[at] = same_row(by, row, packed[at - 1] & lower) ? 0 : (i64)1 << 32;
}

// Of such numbers, sorted: positions; the flag of each, and that of the one before it of the same hash, -1 for none, or -2
// where their rows are unlike; and whether it is the last of its hash.
extern "C" __global__ void find_neighbours(
    Compared by, const u64* packed, i64 size, i64 bits, const bool* flags, i64* order, bool* mine, signed char* before,
    bool* last) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  u64 own = packed[at], lower = ((u64)1 << bits) - 1;
  order[at] = own & lower;
  mine[at] = flags[own & lower];
  last[at] = at == size - 1 || packed[at + 1] >> bits != own >> bits;
  int other = -1;
  if (at && packed[at - 1] >> bits == own >> bits)
    other = same_row(by, own & lower, packed[at - 1] & lower) ? flags[packed[at - 1] & lower] : -2;
  before[at] = other;
}

// Of their running sum: each one's group, and where groups begin and end.
extern "C" __global__ void number_groups(const i64* running, i64 size, i64* group, i64* bounds) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 number = (running[at] & 0xFFFFFFFFu) - 1;
  group[at] = number;
  if (!at || (running[at - 1] & 0xFFFFFFFFu) - 1 != number) bounds[number] = at;
  if (at == size - 1) bounds[number + 1] = size;
}

// --- rows that flags are set of: flagged.py ----------------------------------------------------

struct Part {
  const bool* flags;  // null where all rows are wanted
  const bool* unless;  // of those that are not wanted after all; null for none
  const i64* places;  // which row each flag is of; null where they are in order
  i64 end;  // rows of this part and those before
  const i64* columns[FLAGGED_COLUMNS];  // null where a column's first number and its step say what it has
  i64 firsts[FLAGGED_COLUMNS];
  i64 steps[FLAGGED_COLUMNS];
};
struct Parts { i64 number; Part part[MOST_PARTS]; };
struct Numbers { i64 number; const i64* at[MOST_NUMBERS]; };

__device__ i64 part_of(const Parts& in, i64 at) {
  i64 part = 0;
  while (in.part[part].end <= at) ++part;
  return part;
}

// One thread for a flag: 1 where its row is wanted, else 0.
extern "C" __global__ void flag_rows(Parts from, i64 size, int* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 part = part_of(from, at), begin = part ? from.part[part - 1].end : 0;
  const bool *flags = from.part[part].flags, *unless = from.part[part].unless;
  const i64* places = from.part[part].places;
  bool wanted = (!flags || flags[at - begin]) && !(unless && unless[at - begin]);
  out[places ? begin + places[at - begin] : at] = wanted ? 1 : 0;
}

// One thread for a row. `running` has how many flags are set up to and with each; `told` gets that of each part's last
// row, and then the numbers.
extern "C" __global__ void put_flagged(
    Parts from, Numbers numbers, i64 size, i64 columns, bool every, const int* running, i64* out, i64* told) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < numbers.number) told[from.number + at] = *numbers.at[at];
  if (at >= size) return;
  i64 part = part_of(from, at), begin = part ? from.part[part - 1].end : 0;
  i64 before = every ? at : at ? running[at - 1] : 0, now = every ? at + 1 : running[at];
  if (at == from.part[part].end - 1) told[part] = now;
  if (now == before) return;
#pragma unroll 1
  for (i64 column = 0; column < columns; ++column) {
    const i64* values = from.part[part].columns[column];
    i64 value = from.part[part].firsts[column] + from.part[part].steps[column] * (at - begin);
    out[column * size + before] = values ? values[at - begin] : value;
  }
}

// --- numbers beside rows: kernels.py -----------------------------------------------------------

// One thread for a number, which is added at its index. Zeros are left out: their index may be one of none.
extern "C" __global__ void add_numbers(const i64* index, const int* values, i64 size, int* target) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < size && values[at]) atomicAdd(target + index[at], values[at]);
}

// --- the nearest row in time: nearest.py -------------------------------------------------------

struct Wanted {
  bool back;  // rows before a time, else those after it
  bool exact;  // one of just the time is one
  bool any;  // however far; else no farther than `farthest` has it
  bool arrival;  // of rows of one time the last to come; else the one with the greatest of `ties`
};

// From a place in a run, step by step, to the first row that counts and has the probe row's key; -1 where the hash or the
// times that are wanted end before, -2 after too many steps.
__device__ i64 walked(
    const Compared& by, const Run& run, i64 entries, i64 probe_row, u64 hash, i64 place, i64 limit, bool back, bool any,
    const signed char* states, i64 least, i64 most) {
  for (int step = 0; step < NEAREST_STEPS; ++step) {
    if (place < 0 || place >= entries || run.entries[place] >> 32 != hash) return -1;
    if (!any && (back ? run.times[place] < limit : run.times[place] > limit)) return -1;
    if (is_match(by, probe_row, run.entries[place] & 0xFFFFFFFFu, states, false, least, most)) return place;
    place += back ? -1 : 1;
  }
  return -2;
}

// One thread for a probe row: its best row so far, or a nearer one of this run; of one time the newest. -1 for none, -2
// for good where there were too many steps.
extern "C" __global__ void nearest_in_run(
    Compared by, Run run, Wanted wanted, i64 entries, i64 size, const u64* hashes, const i64* times,
    const i64* farthest, const signed char* states, i64 least, i64 most, const i64* ties, i64* best, i64* best_times) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 before = best[at], limit = wanted.any ? 0 : farthest[at];
  if (before == -2) return;
  u64 hash = hashes[at] >> 32;
  bool any = wanted.any;
  if (before >= 0) {
    i64 time = best_times[at];
    if (any || (wanted.back ? time > limit : time < limit)) limit = time;
    any = false;
  }
  int low = run.directory[hash >> run.shift], high = run.directory[(hash >> run.shift) + 1];
  i64 place = bisected(run, hash, times[at], low, high, wanted.exact == wanted.back) - (wanted.back ? 1 : 0);
  place = walked(by, run, entries, at, hash, place, limit, wanted.back, any, states, least, most);
  if (place >= 0 && !wanted.back) {  // on to the newest of this time
    place = bisected(run, hash, run.times[place], (int)place, high, true) - 1;
    place = walked(by, run, entries, at, hash, place, 0, true, true, states, least, most);
  }
  if (place == -2) best[at] = -2;
  if (place < 0) return;
  i64 time = run.times[place], slot = run.entries[place] & 0xFFFFFFFFu;
  if (before >= 0 && time == best_times[at]) {
    bool newer = slot > before;
    if (!wanted.arrival && ties[slot] != ties[before]) newer = ties[slot] > ties[before];
    if (!newer) return;
  }
  best[at] = slot;
  best_times[at] = time;
}

// --- ranges: nearest.py ------------------------------------------------------------------------

// One thread for a range: its first position whose numbers, the first above all, are not less than what is wanted (or,
// with `after`, greater).
extern "C" __global__ void bisect_ranges(
    const i64* first, const i64* second, const i64* third, const i64* wanted, const i64* then, const i64* last,
    i64 size, const i64* lows, const i64* highs, bool after, i64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 low = lows[at], high = highs[at];
  while (low < high) {
    i64 middle = low + (high - low) / 2;
    i64 value = first[middle], than = wanted[at];
    if (value == than) value = second[middle], than = then[at];
    if (value == than) value = third[middle], than = last[at];
    if (value < than || (after && value == than)) low = middle + 1; else high = middle;
  }
  out[at] = low;
}

// One thread for a node, so many levels up from one of two trees that is there (or, with `begins`, the rows' own, which it
// puts there): it makes what is below it, and itself. Behind the rows stand some that never are there.
extern "C" __global__ void fold_lives(
    const i64* own_born, const i64* own_died, i64 size, i64 level, i64 up, bool begins, i64* born, i64* died) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= level >> up) return;
  i64 first = at << up, last = first + ((i64)1 << up);
  if (begins)
    for (i64 row = first; row < last; ++row) {
      born[level + row] = row < size ? own_born[row] : 9223372036854775807;
      died[level + row] = row < size ? own_died[row] : -9223372036854775807 - 1;
    }
  for (i64 low = (level + first) >> 1, high = (level + last) >> 1, left = up; left; --left, low >>= 1, high >>= 1)
    for (i64 node = low; node < high; ++node) {
      born[node] = min(born[2 * node], born[2 * node + 1]);
      died[node] = max(died[2 * node], died[2 * node + 1]);
    }
}

// One thread for a range: its last row that is there at a state of a span, by a tree over all rows with the first birth
// and the last death below each node; -1 for none.
extern "C" __global__ void last_there(
    const i64* born, const i64* died, i64 width, i64 size, const i64* lows, const i64* highs, const i64* begins,
    const i64* ends, i64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 low = lows[at], to = highs[at], begin = begins[at], end = ends[at], found = -1;
  int most = 63;
  while (to > low) {
    // the largest node that ends here, or, where that has such a row, the right half of it
    int level = 0;
    while (level < most && !(to >> level & 1)) ++level;
    i64 node = ((width + to) >> level) - 1;
    if (born[node] < end && died[node] > begin) {
      if (!level) { found = to - 1; break; }
      most = level - 1;
    } else {
      most = 63;
      to -= (i64)1 << level;
    }
  }
  out[at] = found;
}

// --- the least at each moment: least.py --------------------------------------------------------

// Into n ascending numbers, of which any thread may change any: each keeps the least that has come to it.
__device__ void put_least(u64* numbers, i64 n, u64 number) {
  for (i64 at = 0; at < n; ++at) {
    u64 other = atomicMin(numbers + at, number);
    if (other > number) number = other;
    if (number == NO_RANK) return;
  }
}

// One thread for a span of moments: its rank goes to the few nodes of a tree over all moments that make it up.
extern "C" __global__ void put_spans(
    const i64* begins, const i64* ends, const i64* ranks, i64 spans, i64 width, i64 n, u64* tree) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= spans) return;
  i64 low = begins[at] + width, high = ends[at] + width;
  u64 rank = ranks[at];
  for (; low < high; low >>= 1, high >>= 1) {
    if (low & 1) put_least(tree + low++ * n, n, rank);
    if (high & 1) put_least(tree + --high * n, n, rank);
  }
}

// One thread for a moment: the n least of all nodes above it.
extern "C" __global__ void least_at_moments(const u64* tree, i64 width, i64 n, i64 size, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  u64* own = out + at * n;
  for (i64 node = at + width; node; node >>= 1)
    for (i64 from = 0; from < n && tree[node * n + from] < own[n - 1]; ++from) {
      u64 rank = tree[node * n + from];
      i64 to = n - 1;
      for (; to && own[to - 1] > rank; --to) own[to] = own[to - 1];
      own[to] = rank;
    }
}

// --- rows that come in GPU memory: dataframes.py ------------------------------------------------

// One thread for a row: whether its text is no UTF-8. No surrogates, nothing longer than it has to be, nothing beyond
// U+10FFFF, and no character that ends in the next row.
extern "C" __global__ void find_invalid_text(const unsigned char* text, const i64* offsets, i64 size, bool* out) {
  i64 row = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (row >= size) return;
  bool wrong = false;
  i64 end = offsets[row + 1];
  for (i64 at = offsets[row]; at < end && !wrong;) {
    unsigned char first = text[at++];
    if (first < 0x80) continue;
    int more = first < 0xC2 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : first < 0xF5 ? 3 : 0;
    if (!more || end - at < more) {
      wrong = true;
      break;
    }
    unsigned char least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    unsigned char most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    wrong = text[at] < least || text[at] > most;
    for (int i = 1; i < more; ++i) wrong |= (text[at + i] & 0xC0) != 0x80;
    at += more;
  }
  out[row] = wrong;
}
