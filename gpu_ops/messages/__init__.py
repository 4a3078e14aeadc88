"""Messages of a log, such as Kafka's, as Arrow rows. `gpu_ops.spark.sources.kafka` makes streams of them."""
