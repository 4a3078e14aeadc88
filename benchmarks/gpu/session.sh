#!/usr/bin/env bash
# Checks and benchmarks of a host with a card, in steps that each end within ten minutes. README.md has the sequence.
#
#   session.sh pack [--spark]   here: what an offline host lacks, into .gpu-parts; what is there already is kept
#   session.sh part             there, once for each part that was carried: unpack it
#   session.sh quarter          there: what fifteen minutes should run, on from where the last call stopped; needs --spark
#   session.sh check            there: does the stack work, does the backend keep its contract
#   session.sh engine           there: copy bandwidth, the left join up to 100M rows, probes up to 1B rows
#   session.sh shapes           there: 100k and 10M changes, ways of probing, keys, partitions, first micro-batches
#   session.sh cpu              there: the CPU engine beside it, on one core
#   session.sh parts            there: appends, merges, transfers, other joins
#   session.sh contract|dataframes|golden|traces   there: the rest of the contract; cuDF; all golden cases; random traces
#   session.sh demo             there: the demo on Spark
#   session.sh keep FOLDER      here: take over the results that came back
#
# Results go to $OUT (default benchmarks/results), each step into the same file; a copy of what came back earlier, in
# benchmarks/results, travels along and is gone on with.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=benchmarks/results
out=${OUT:-$results}
site=${GPU_SITE:-/tmp/site}
shared=${GPU_SHARED:-../shared/gpu}
parts=.gpu-parts
extra=$parts/extra
compiled=$extra/cupy.tgz # what cupy has compiled: a minute less on the next bare host
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

on_card() {
  if [ -d "$site" ]; then export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH; fi
  if [ -x "$site/spark-java/bin/java" ]; then
    export JAVA_HOME=$site/spark-java PYSPARK_PYTHON=$python SPARK_LOCAL_IP=127.0.0.1
  fi
  mkdir -p "$out"
  if [ -e "$compiled" ] && [ ! -e ~/.cupy/kernel_cache ]; then tar -xzf "$compiled" -C ~; fi
  for file in "$results"/gpu-* "$results"/quarter*; do
    if [ -e "$file" ] && [ ! -e "$out/$(basename "$file")" ]; then cp "$file" "$out/"; fi
  done
}

verify() { on_card; "$python" -m benchmarks.gpu.verify --out "$out" "$@"; }
bench() { on_card; "$python" -m benchmarks.gpu.bench --out "$out" "$@"; }

step=${1:-help}
shift || true
case $step in
  pack)
    bundles=(gpu) names=(sqlglot duckdb)
    if [ "${1:-}" = --spark ]; then bundles+=(spark) names+=(tpchgen-cli); fi
    wanted="${bundles[*]} ${names[*]} $(cat "$shared"/pack.sh "$shared"/repack.py | sha256sum)"
    if [ "$(cat "$parts/packed" 2>/dev/null)" != "$wanted" ] || ! compgen -G "$parts/part-*" >/dev/null; then
      # the checkout and one part travel together, in at most 64 MiB
      bash "$shared/pack.sh" --part-mib 48 "${bundles[@]}"
      mkdir -p "$extra"
      for name in "${names[@]}"; do
        "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
          --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
          --platform manylinux2014_x86_64 -d "$extra" "$name"
      done
      echo "$wanted" >"$parts/packed"
    fi
    ls -d "$parts"/part-*
    ;;
  part)
    for folder in "$parts"/part-*; do bash "$folder/unpack.sh"; break; done # it takes all that are there
    if compgen -G "$extra/*.whl" >/dev/null; then
      "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --disable-pip-version-check --root-user-action=ignore --target "$site" "$extra"/*.whl
    fi
    ;;
  quarter)
    on_card
    "$python" -m "${QUARTER:-benchmarks.gpu.quarter}" --out "$out" --resume "$@" || failed=$?
    if [ -e ~/.cupy/kernel_cache ]; then tar -czf "$out/cupy.tgz" -C ~ .cupy/kernel_cache; fi
    exit "${failed:-0}"
    ;;
  check)
    on_card
    for folder in "$parts"/part-*; do
      if [ -e "$folder/check_gpu.py" ]; then "$python" "$folder/check_gpu.py"; break; fi
    done
    verify --step smoke
    tar -czf "$out/cupy.tgz" -C ~ .cupy/kernel_cache
    "$python" -m benchmarks.gpu.bench --out "$out/quick.json" --quick --budget-s 120
    verify --step contract --limit-s 300 --resume "$@"
    ;;
  engine) bench --part copy --part regular --part probe --budget-s 480 --resume "$@" ;;
  shapes)
    bench --part first --part sweep --part probes --part keys --part partitions --budget-s 480 --resume "$@"
    ;;
  cpu) bench --part cpu --budget-s 480 --resume "$@" ;;
  parts)
    bench --part state --part transfer --part interval --part multi_way --part ways --part at_end --part snapshot \
      --part peers --budget-s 480 --resume "$@"
    ;;
  contract | dataframes | golden | traces) verify --step "$step" --limit-s 500 --resume "$@" ;;
  demo) verify --step demo "$@" ;;
  keep)
    mkdir -p "$results"
    rm -f "$results"/gpu-*.passed "$results"/quarter.*.passed
    for file in "$1"/gpu-* "$1"/quarter*; do
      if [ -e "$file" ]; then cp "$file" "$results/"; fi
    done
    mkdir -p "$extra"
    if [ -e "$1/cupy.tgz" ]; then cp "$1/cupy.tgz" "$compiled"; fi
    ls "$results"/gpu-* "$results"/quarter* 2>/dev/null || true
    ;;
  *) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
