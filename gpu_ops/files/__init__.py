"""How the files of a stream are read, as Arrow record batches. `gpu_ops.spark.files` makes streams of them."""
