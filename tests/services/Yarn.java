import java.io.FileOutputStream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.server.MiniYARNCluster;

/** YARN with two NodeManagers on this machine; writes the `yarn-site.xml` of its clients into FOLDER, and stays. */
public class Yarn {
  public static void main(String[] folder) throws Exception {
    YarnConfiguration settings = new YarnConfiguration();
    settings.set("yarn.nodemanager.resource.memory-mb", "6144");
    settings.set("yarn.nodemanager.resource.cpu-vcores", "8");
    settings.set("yarn.scheduler.minimum-allocation-mb", "256");
    settings.set("yarn.scheduler.maximum-allocation-mb", "4096");
    settings.set("yarn.nodemanager.vmem-check-enabled", "false");
    settings.set("yarn.nodemanager.pmem-check-enabled", "false");
    settings.set("yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage", "99.9");
    settings.set("yarn.scheduler.capacity.root.queues", "default");
    settings.set("yarn.scheduler.capacity.root.default.capacity", "100");
    settings.set("yarn.scheduler.capacity.root.default.maximum-am-resource-percent", "0.9");
    settings.set("yarn.resourcemanager.bind-host", "127.0.0.1");
    settings.set("yarn.nodemanager.bind-host", "127.0.0.1");
    settings.setBoolean("yarn.is.minicluster", true);
    MiniYARNCluster cluster = new MiniYARNCluster("gpu-join", 1, 2, 1, 1);
    cluster.init(settings);
    cluster.start();
    Thread.sleep(3000);
    Configuration made = cluster.getConfig();
    made.unset("yarn.scheduler.configuration.store.class");
    try (FileOutputStream file = new FileOutputStream(folder[0] + "/yarn-site.xml")) {
      made.writeXml(file);
    }
    Thread.sleep(Long.MAX_VALUE);
  }
}
