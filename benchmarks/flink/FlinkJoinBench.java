import com.sun.management.OperatingSystemMXBean;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.flink.api.common.functions.FlatMapFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.DataStreamSink;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.Schema;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.ProviderContext;
import org.apache.flink.table.connector.sink.DataStreamSinkProvider;
import org.apache.flink.table.connector.sink.DynamicTableSink;
import org.apache.flink.table.connector.source.DataStreamScanProvider;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.binary.BinaryRowData;
import org.apache.flink.table.data.writer.BinaryRowWriter;
import org.apache.flink.table.factories.DynamicTableSinkFactory;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.LogicalTypeRoot;
import org.apache.flink.table.types.logical.RowType;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;
import org.apache.flink.util.Collector;

/**
 * The peer of the benchmark {@code vs_flink}: {@code orders LEFT JOIN prices (LEFT JOIN stocks)} on Flink, heap state, in one
 * JVM.
 *
 * <p>Two sources. {@code sql} is what a user would write: Flink's file connector with its CSV format, and a map
 * that makes a change of each row. {@code lean} is a connector of this file: a file's bytes are parsed straight
 * into a binary row, and no row is converted on its way in. The sink counts on Flink's internal rows. Each input
 * is read by one task, because the order of the changes of a key has to be kept; the join has the parallelism
 * asked for.
 *
 * <p>Options: {@code --data DIR --source sql|lean --parallelism N --mini-batch true|false --mini-batch-size N
 * --mini-batch-latency DURATION --unique-key true|false --inputs 2|3 --multi-join true|false --heap-at-row N
 * --repeat N}. Prints one JSON object per repeat.
 */
public final class FlinkJoinBench {

    /** Shared by all tasks: the mini cluster runs in this JVM. */
    private static final class Clock {
        static final OperatingSystemMXBean SYSTEM =
                (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        static long firstRead;
        static long lastWritten;
        static long cpuAtFirstRead;
        static long cpuAtLastWritten;
        static long rowsIn;
        static final long[] rowsOut = new long[RowKind.values().length];
        static long rows;
        static long pads;
        static long amount;
        static double price;
        static final AtomicLong written = new AtomicLong();
        static long heapAtRow;
        static long heap;

        static synchronized void reset() {
            firstRead = 0;
            rowsIn = rows = pads = amount = 0;
            price = 0;
            heap = 0;
            written.set(0);
            Arrays.fill(rowsOut, 0);
        }

        static synchronized void reading() {
            if (firstRead == 0) {
                cpuAtFirstRead = SYSTEM.getProcessCpuTime();
                firstRead = System.nanoTime();
            }
        }

        static synchronized void read(long count) {
            rowsIn += count;
        }

        /** Live objects when a given row is written: the state of all operators, and what every JVM holds. */
        static void measureHeap() {
            if (heapAtRow > 0 && written.incrementAndGet() == heapAtRow) {
                System.gc();
                heap = ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed();
            }
        }

        /** The last of the parallel sinks determines the end. */
        static synchronized void written(Counter counter) {
            lastWritten = System.nanoTime();
            cpuAtLastWritten = SYSTEM.getProcessCpuTime();
            for (int i = 0; i < rowsOut.length; i++) {
                rowsOut[i] += counter.kinds[i];
            }
            rows += counter.rows;
            pads += counter.pads;
            amount += counter.amount;
            price += counter.price;
        }
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (int i = 0; i + 1 < arguments.length; i += 2) {
            options.put(arguments[i], arguments[i + 1]);
        }
        int repeat = Integer.parseInt(options.getOrDefault("--repeat", "1"));
        for (int i = 0; i < repeat; i++) {
            System.out.println(run(options));
        }
    }

    private static final String[][] INPUTS = {
        {"orders", "order_id BIGINT NOT NULL, customer BIGINT, amount BIGINT, note STRING"},
        {"prices", "order_id BIGINT NOT NULL, price DOUBLE, source STRING"},
        {"stocks", "order_id BIGINT NOT NULL, quantity BIGINT, place STRING"}
    };

    /** The connector of this file. */
    private static void lean(
            StreamTableEnvironment tables, String data, String name, String columns, boolean uniqueKey) {
        String key = uniqueKey ? ", PRIMARY KEY (order_id) NOT ENFORCED" : "";
        tables.executeSql("CREATE TABLE " + name + " (" + columns + key
                + ") WITH ('connector' = 'bench-changes', 'path' = '" + data + "/" + name + "')");
    }

    /**
     * Flink's file connector and CSV format; the row kind is set in the DataStream API, as the format knows none.
     * FROM_CHANGELOG would do it in SQL, but its result has no primary key, and it takes longer (see README.md).
     */
    private static void sql(
            StreamTableEnvironment tables, String data, String name, String columns, boolean uniqueKey) {
        tables.executeSql("CREATE TABLE " + name + "_file (op STRING, " + columns
                + ") WITH ('connector' = 'filesystem', 'format' = 'csv', 'path' = '" + data + "/whole/" + name + ".csv')");
        Schema.Builder schema = Schema.newBuilder();
        List<String> names = new ArrayList<>();
        List<TypeInformation<?>> types = new ArrayList<>();
        for (String column : columns.split(", ")) {
            String[] words = column.split(" ", 2);
            schema.column(words[0], words[1]);
            names.add(words[0]);
            types.add(words[1].startsWith("BIGINT")
                    ? Types.LONG
                    : words[1].equals("DOUBLE") ? Types.DOUBLE : Types.STRING);
        }
        if (uniqueKey) {
            schema.primaryKey("order_id");
        }
        TypeInformation<Row> type = Types.ROW_NAMED(
                names.toArray(new String[0]), types.toArray(new TypeInformation<?>[0]));
        DataStream<Row> changes = tables.toDataStream(tables.from(name + "_file"))
                .map(new ToChange()).returns(type).setParallelism(1);
        tables.createTemporaryView(name, tables.fromChangelogStream(changes, schema.build(), ChangelogMode.all()));
    }

    /** A row with its kind in the first column as a change. */
    private static final class ToChange extends RichMapFunction<Row, Row> {
        private static final long serialVersionUID = 1;
        private transient long count;

        @Override
        public void open(OpenContext context) {
            Clock.reading();
        }

        @Override
        public Row map(Row row) {
            count++;
            Object[] values = new Object[row.getArity() - 1];
            for (int i = 0; i < values.length; i++) {
                values[i] = row.getField(i + 1);
            }
            return Row.ofKind(kind((String) row.getField(0)), values);
        }

        private static RowKind kind(String op) {
            switch (op) {
                case "+I":
                    return RowKind.INSERT;
                case "-U":
                    return RowKind.UPDATE_BEFORE;
                case "+U":
                    return RowKind.UPDATE_AFTER;
                default:
                    return RowKind.DELETE;
            }
        }

        @Override
        public void close() {
            Clock.read(count);
            count = 0;
        }
    }

    private static String run(Map<String, String> options) throws Exception {
        String data = options.get("--data");
        boolean miniBatch = Boolean.parseBoolean(options.getOrDefault("--mini-batch", "false"));
        boolean uniqueKey = Boolean.parseBoolean(options.getOrDefault("--unique-key", "true"));
        int parallelism = Integer.parseInt(options.getOrDefault("--parallelism", "1"));

        Configuration conf = new Configuration();
        conf.setString("state.backend.type", "hashmap");
        conf.setString("pipeline.object-reuse", "true");
        StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(parallelism, conf);
        StreamTableEnvironment tables = StreamTableEnvironment.create(env);
        tables.getConfig().set("table.exec.mini-batch.enabled", String.valueOf(miniBatch));
        if (miniBatch) {
            tables.getConfig().set("table.exec.mini-batch.size", options.get("--mini-batch-size"));
            tables.getConfig().set("table.exec.mini-batch.allow-latency", options.get("--mini-batch-latency"));
        }
        int inputs = Integer.parseInt(options.getOrDefault("--inputs", "2"));
        tables.getConfig().set("table.optimizer.multi-join.enabled", options.getOrDefault("--multi-join", "false"));
        Clock.heapAtRow = Long.parseLong(options.getOrDefault("--heap-at-row", "0"));
        // each input is read by one task, whatever the parallelism of the join
        tables.getConfig().set("table.exec.resource.default-parallelism", "1");
        for (String[] input : Arrays.copyOf(INPUTS, inputs)) {
            if (options.getOrDefault("--source", "lean").equals("lean")) {
                lean(tables, data, input[0], input[1], uniqueKey);
            } else {
                sql(tables, data, input[0], input[1], uniqueKey);
            }
        }
        tables.getConfig().set("table.exec.resource.default-parallelism", String.valueOf(parallelism));
        boolean three = inputs == 3;
        tables.executeSql("CREATE TABLE joined (order_id BIGINT, customer BIGINT, amount BIGINT, note STRING,"
                + " right_order_id BIGINT, price DOUBLE, source STRING"
                + (three ? ", third_order_id BIGINT, quantity BIGINT, place STRING" : "")
                + ") WITH ('connector' = 'bench-changes')");
        String statement =
                "INSERT INTO joined SELECT * FROM orders LEFT JOIN prices ON orders.order_id = prices.order_id"
                + (three ? " LEFT JOIN stocks ON orders.order_id = stocks.order_id" : "");
        String plan = Stream.of(tables.explainSql(statement).split("== Optimized Execution Plan =="))
                .skip(1).flatMap(String::lines).filter(line -> !line.isBlank())
                .map(line -> '"' + line.replace("\\", "\\\\").replace("\"", "\\\"") + '"')
                .collect(Collectors.joining(", ", "[", "]"));

        Clock.reset();
        long begun = System.nanoTime();
        tables.executeSql(statement).await();
        double whole = (System.nanoTime() - begun) / 1e9;
        double seconds = (Clock.lastWritten - Clock.firstRead) / 1e9;
        String kinds = Arrays.stream(RowKind.values())
                .map(kind -> '"' + kind.shortString() + "\": " + Clock.rowsOut[kind.ordinal()])
                .collect(Collectors.joining(", ", "{", "}"));
        return String.format(Locale.ROOT,
                "{\"heap_bytes\": %d, \"rows_in\": %d, \"rows_out\": %d, \"kinds\": %s, \"seconds\": %.4f, "
                        + "\"whole_seconds\": %.4f, \"cpu_seconds\": %.2f, \"folded\": {\"rows\": %d, \"pads\": %d, \"amount\": %d, \"price\": %.2f}, \"plan\": %s}",
                Clock.heap, Clock.rowsIn, Arrays.stream(Clock.rowsOut).sum(), kinds, seconds, whole,
                (Clock.cpuAtLastWritten - Clock.cpuAtFirstRead) / 1e9,
                Clock.rows, Clock.pads, Clock.amount, Clock.price, plan);
    }

    /** Reads changes from the CSV files of a folder, or counts changes. Found by name through the service loader. */
    public static final class Connector implements DynamicTableSourceFactory, DynamicTableSinkFactory {
        private static final ConfigOption<String> PATH = ConfigOptions.key("path").stringType().noDefaultValue();

        @Override
        public String factoryIdentifier() {
            return "bench-changes";
        }

        @Override
        public Set<ConfigOption<?>> requiredOptions() {
            return Set.of();
        }

        @Override
        public Set<ConfigOption<?>> optionalOptions() {
            return Set.of(PATH);
        }

        @Override
        public DynamicTableSource createDynamicTableSource(Context context) {
            RowType type = (RowType) context.getPhysicalRowDataType().getLogicalType();
            return new ChangeSource(context.getCatalogTable().getOptions().get(PATH.key()), type);
        }

        @Override
        public DynamicTableSink createDynamicTableSink(Context context) {
            return new CountingTable();
        }
    }

    private static final class ChangeSource implements ScanTableSource {
        private final String path;
        private final RowType type;

        ChangeSource(String path, RowType type) {
            this.path = path;
            this.type = type;
        }

        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.all();
        }

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext scan) {
            return new DataStreamScanProvider() {
                @Override
                public DataStream<RowData> produceDataStream(ProviderContext context, StreamExecutionEnvironment env) {
                    List<String> files;
                    try (Stream<Path> all = Files.list(Paths.get(path))) {
                        files = all.map(Path::toString).filter(f -> f.endsWith(".csv")).sorted()
                                .collect(Collectors.toCollection(ArrayList::new));
                    } catch (IOException e) {
                        throw new UncheckedIOException(e);
                    }
                    return env.fromSequence(0, files.size() - 1).setParallelism(1)
                            .flatMap(new Parser(files, type)).returns(InternalTypeInfo.<RowData>of(type)).setParallelism(1);
                }

                @Override
                public boolean isBounded() {
                    return true;
                }
            };
        }

        @Override
        public DynamicTableSource copy() {
            return new ChangeSource(path, type);
        }

        @Override
        public String asSummaryString() {
            return "changes";
        }
    }

    /** The number of a file in, its changes out, without an object per field other than the string views. */
    private static final class Parser implements FlatMapFunction<Long, RowData> {
        private static final long serialVersionUID = 1;
        private static final double[] POWERS = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10};
        private final List<String> files;
        private final LogicalTypeRoot[] types;

        Parser(List<String> files, RowType type) {
            this.files = files;
            this.types = type.getChildren().stream().map(LogicalType::getTypeRoot).toArray(LogicalTypeRoot[]::new);
        }

        @Override
        public void flatMap(Long file, Collector<RowData> out) throws Exception {
            Clock.reading();
            byte[] bytes = Files.readAllBytes(Paths.get(files.get(file.intValue())));
            // One row for all changes: with object reuse the exchange after the source has copied it on return.
            BinaryRowData row = new BinaryRowData(types.length);
            BinaryRowWriter writer = new BinaryRowWriter(row, 128);
            int at = 0;
            long count = 0;
            while (at < bytes.length) {
                writer.reset();
                writer.writeRowKind(kind(bytes[at], bytes[at + 1]));
                at += 3;
                for (int column = 0; column < types.length; column++) {
                    int end = at;
                    byte stop = column == types.length - 1 ? (byte) '\n' : (byte) ',';
                    while (bytes[end] != stop) {
                        end++;
                    }
                    switch (types[column]) {
                        case BIGINT:
                            writer.writeLong(column, parseLong(bytes, at, end));
                            break;
                        case DOUBLE:
                            writer.writeDouble(column, parseDouble(bytes, at, end));
                            break;
                        default:
                            writer.writeString(column, StringData.fromBytes(bytes, at, end - at));
                    }
                    at = end + 1;
                }
                writer.complete();
                out.collect(row);
                count++;
            }
            Clock.read(count);
        }

        private static RowKind kind(byte sign, byte letter) {
            switch (letter) {
                case 'I':
                    return RowKind.INSERT;
                case 'D':
                    return RowKind.DELETE;
                default:
                    return sign == '+' ? RowKind.UPDATE_AFTER : RowKind.UPDATE_BEFORE;
            }
        }

        private static long parseLong(byte[] bytes, int from, int to) {
            boolean negative = bytes[from] == '-';
            long value = 0;
            for (int i = negative ? from + 1 : from; i < to; i++) {
                value = value * 10 + (bytes[i] - '0');
            }
            return negative ? -value : value;
        }

        /** Plain decimals of up to 15 digits, which one division rounds correctly; anything else by the JDK. */
        private static double parseDouble(byte[] bytes, int from, int to) {
            long digits = 0;
            int point = to - 1;
            for (int i = from; i < to; i++) {
                byte b = bytes[i];
                if (b == '.') {
                    point = i;
                } else if (b >= '0' && b <= '9') {
                    digits = digits * 10 + (b - '0');
                } else {
                    return Double.parseDouble(new String(bytes, from, to - from, StandardCharsets.US_ASCII));
                }
            }
            if (to - from > 16 || to - 1 - point >= POWERS.length) {
                return Double.parseDouble(new String(bytes, from, to - from, StandardCharsets.US_ASCII));
            }
            return digits / POWERS[to - 1 - point];
        }
    }

    private static final class CountingTable implements DynamicTableSink {
        @Override
        public ChangelogMode getChangelogMode(ChangelogMode requested) {
            return ChangelogMode.all(); // the whole changelog, -U included, as the other side of the benchmark emits it
        }

        @Override
        public SinkRuntimeProvider getSinkRuntimeProvider(Context context) {
            return new DataStreamSinkProvider() {
                @Override
                public DataStreamSink<?> consumeDataStream(ProviderContext provider, DataStream<RowData> stream) {
                    return stream.sinkTo(new CountingSink());
                }
            };
        }

        @Override
        public DynamicTableSink copy() {
            return new CountingTable();
        }

        @Override
        public String asSummaryString() {
            return "count";
        }
    }

    private static final class CountingSink implements Sink<RowData> {
        private static final long serialVersionUID = 1;

        @Override
        public SinkWriter<RowData> createWriter(WriterInitContext context) {
            return new Counter();
        }
    }

    /** Counts, and folds what is compared with the expected result: one row adds or removes its values. */
    private static final class Counter implements SinkWriter<RowData> {
        private final long[] kinds = new long[RowKind.values().length];
        private long rows;
        private long pads;
        private long amount;
        private double price;

        @Override
        public void write(RowData row, Context context) {
            Clock.measureHeap();
            RowKind kind = row.getRowKind();
            kinds[kind.ordinal()]++;
            int sign = kind == RowKind.INSERT || kind == RowKind.UPDATE_AFTER ? 1 : -1;
            rows += sign;
            amount += sign * row.getLong(2);
            if (row.isNullAt(4)) {
                pads += sign;
            } else {
                price += sign * row.getDouble(5);
            }
        }

        @Override
        public void flush(boolean endOfInput) {
            if (endOfInput) {
                Clock.written(this);
            }
        }

        @Override
        public void close() {}
    }
}
