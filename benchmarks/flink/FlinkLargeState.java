import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.LocalDateTime;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.functions.FlatMapFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;
import org.apache.flink.util.Collector;

/**
 * The peer of {@code large_state_peers}: a query over folders that files come into, with the state in RocksDB.
 *
 * <p>Arguments: a parallelism, after how many rows to print, rows with a payment after which the first query ends, the
 * files of both queries, parted by empty lines, whose last statement is a SELECT, and settings of Flink's as {@code
 * name=value}. Waits for a line between the queries, and for the end of standard input to end the second one. Prints
 * JSON objects: how many rows were inserted, and at the end how many are left and the sum over the changelog.
 */
public final class FlinkLargeState {
    private static final AtomicLong CAME = new AtomicLong();
    private static final AtomicLong GONE = new AtomicLong();
    private static final AtomicLong PAID = new AtomicLong();
    private static final AtomicLong SUM = new AtomicLong();

    private FlinkLargeState() {}

    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        long every = Long.parseLong(arguments[1]);
        JobClient warm = start(arguments, arguments[3], Long.MAX_VALUE);
        while (PAID.get() < Long.parseLong(arguments[2])) {
            Thread.sleep(10);
            if (warm.getJobStatus().get().isTerminalState()) {
                warm.getJobExecutionResult().get();  // throws what it failed for
            }
        }
        warm.cancel().get();
        List.of(CAME, GONE, PAID, SUM).forEach(count -> count.set(0));
        System.out.println("{\"event\": \"warm\"}");
        input.readLine();
        start(arguments, arguments[4], every).getJobExecutionResult().exceptionally(error -> {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
            return null;
        });
        while (input.readLine() != null) {
            continue;
        }
        System.out.println(String.format(
                "{\"event\": \"end\", \"rows\": %d, \"sum\": %d}", CAME.get() - GONE.get(), SUM.get()));
        Runtime.getRuntime().halt(0);
    }

    private static JobClient start(String[] arguments, String file, long every) throws Exception {
        Configuration conf = new Configuration();
        for (int i = 5; i < arguments.length; i++) {
            String[] setting = arguments[i].split("=", 2);
            conf.setString(setting[0], setting[1]);
        }
        StreamExecutionEnvironment env =
                StreamExecutionEnvironment.createLocalEnvironment(Integer.parseInt(arguments[0]), conf);
        StreamTableEnvironment tables = StreamTableEnvironment.create(env);
        List<String> statements = new ArrayList<>(List.of(Files.readString(Path.of(file)).split("\n\n+")));
        String last = statements.remove(statements.size() - 1);
        statements.forEach(tables::executeSql);
        tables.toChangelogStream(tables.sqlQuery(last))
                .flatMap(new Counter(every)).returns(Types.VOID).sinkTo(new DiscardingSink<>());
        return env.executeAsync();
    }

    /** Counts, and adds up all columns; a row that is retracted counts negatively. */
    private static final class Counter implements FlatMapFunction<Row, Void> {
        private static final long serialVersionUID = 1;
        private final long every;

        Counter(long every) {
            this.every = every;
        }

        @Override
        public void flatMap(Row row, Collector<Void> out) {
            boolean comes = row.getKind() == RowKind.INSERT || row.getKind() == RowKind.UPDATE_AFTER;
            SUM.addAndGet(comes ? sum(row) : -sum(row));
            long count = (comes ? CAME : GONE).incrementAndGet();
            if (comes && row.getField("amount") != null) {
                PAID.incrementAndGet();
            }
            if (comes && count % every == 0) {
                System.out.println("{\"event\": \"rows\", \"came\": " + count + "}");
            }
        }

        /** As {@code SUM} in {@code large_state_peers}. */
        private static long sum(Row row) {
            String address = row.getFieldAs("address");
            return whole(row, "k", 0) + 3 * Long.parseLong(row.<String>getFieldAs("name").substring(9, 21))
                    + 5 * Long.parseLong(address.substring(0, 19))
                    + 7 * Long.parseLong(address.substring(address.length() - 4))
                    + 11 * whole(row, "n0", 0) + 13 * whole(row, "n1", 0) + 17 * whole(row, "n2", 0)
                    + 19 * whole(row, "n3", 0) + 23 * whole(row, "n4", 0)
                    + 29 * (long) (row.<Double>getFieldAs("price") * 8)
                    + 31 * (row.<LocalDateTime>getFieldAs("at").getSecond())
                    + 37 * whole(row, "amount", -1) + 41 * whole(row, "batch", -1);
        }

        private static long whole(Row row, String column, long otherwise) {
            Long value = row.getFieldAs(column);
            return value == null ? otherwise : value;
        }
    }
}
