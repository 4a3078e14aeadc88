import java.nio.file.*;
import java.util.*;
import org.apache.flink.api.common.RuntimeExecutionMode;
import org.apache.flink.api.common.typeinfo.*;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.*;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.types.*;
import org.apache.flink.util.CloseableIterator;

/**
 * Changes (a line each: trace, row kind, k, x, d) through a query of Flink's; its changelog, in order.
 * Arguments: the changes, the changelog, the query over c, and "insert" where no row is ever taken back.
 */
public class FlinkAggregates {
    public static void main(String[] args) throws Exception {
        StreamExecutionEnvironment env = StreamExecutionEnvironment.getExecutionEnvironment();
        env.setParallelism(1);
        env.setRuntimeMode(RuntimeExecutionMode.STREAMING);
        StreamTableEnvironment t = StreamTableEnvironment.create(env);
        List<Row> rows = new ArrayList<>();
        for (String line : Files.readAllLines(Path.of(args[0]))) {
            String[] p = line.split("\t", -1);
            RowKind kind = p[1].equals("+I") ? RowKind.INSERT : p[1].equals("-U") ? RowKind.UPDATE_BEFORE
                : p[1].equals("+U") ? RowKind.UPDATE_AFTER : RowKind.DELETE;
            rows.add(Row.ofKind(kind, Integer.valueOf(p[0]), p[2].isEmpty() ? null : p[2],
                p[3].isEmpty() ? null : Long.valueOf(p[3]), p[4].isEmpty() ? null : Double.valueOf(p[4])));
        }
        TypeInformation<Row> type = Types.ROW_NAMED(new String[] {"trace", "k", "x", "d"}, Types.INT, Types.STRING, Types.LONG, Types.DOUBLE);
        DataStream<Row> stream = env.fromCollection(rows, type);
        t.createTemporaryView("c", t.fromChangelogStream(stream,
            Schema.newBuilder().column("trace", DataTypes.INT()).column("k", DataTypes.STRING())
                .column("x", DataTypes.BIGINT()).column("d", DataTypes.DOUBLE()).build(), args.length > 3 ? ChangelogMode.insertOnly() : ChangelogMode.all()));
        Table result = t.sqlQuery(args[2]);
        List<String> out = new ArrayList<>();
        try (CloseableIterator<Row> it = t.toChangelogStream(result).executeAndCollect()) {
            while (it.hasNext()) {
                Row row = it.next();
                StringBuilder s = new StringBuilder(row.getKind().shortString());
                for (int i = 0; i < row.getArity(); i++) s.append('\t').append(row.getField(i) == null ? "" : row.getField(i));
                out.add(s.toString());
            }
        }
        Files.write(Path.of(args[1]), out);
    }
}
