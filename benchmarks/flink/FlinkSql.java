import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;

/**
 * Runs SQL statements, parted by empty lines, and waits for the last one, an INSERT over bounded inputs.
 *
 * <p>Arguments: a parallelism, whether to measure the heap, and files of statements; each file is run by an environment
 * of its own in this JVM. Prints a JSON object per file: the seconds that the last statement took, planning and the
 * start of the job included, and the bytes of live objects.
 */
public final class FlinkSql {
    private FlinkSql() {}

    public static void main(String[] arguments) throws Exception {
        Heap heap = new Heap();
        if (Boolean.parseBoolean(arguments[1])) {
            heap.setDaemon(true);
            heap.start();
        }
        for (int i = 2; i < arguments.length; i++) {
            Configuration conf = new Configuration();
            conf.setString("state.backend.type", "hashmap");
            conf.setString("pipeline.object-reuse", "true");
            StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(
                    Integer.parseInt(arguments[0]), conf);
            StreamTableEnvironment tables = StreamTableEnvironment.create(env);
            List<String> statements = new ArrayList<>(List.of(Files.readString(Path.of(arguments[i])).split("\n\n+")));
            String last = statements.remove(statements.size() - 1);
            statements.forEach(tables::executeSql);
            heap.most = 0;
            long begun = System.nanoTime();
            tables.executeSql(last).await();
            double seconds = (System.nanoTime() - begun) / 1e9;
            System.out.println(String.format(
                    Locale.ROOT, "{\"seconds\": %.4f, \"live_bytes\": %d}", seconds, heap.most));
        }
    }

    /** The most live objects: a collection and a look at the heap, again and again. */
    private static final class Heap extends Thread {
        private volatile long most;

        @Override
        public void run() {
            try {
                while (true) {
                    System.gc();
                    most = Math.max(most, ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed());
                    Thread.sleep(200);
                }
            } catch (InterruptedException e) {
                Thread.currentThread().interrupt();
            }
        }
    }
}
