"""How the files of a stream are read, as Arrow record batches. `gpu_ops.spark.sources.files` makes streams of them."""
