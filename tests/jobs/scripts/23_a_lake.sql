CREATE TABLE orders (id STRING, cost FLOAT) WITH (
    'connector' = 'kafka', 'topic' = 'orders', 'properties.bootstrap.servers' = 'broker:9092',
    'scan.startup.mode' = 'earliest-offset', 'format' = 'json'
);
SET 'execution.checkpointing.interval' = '60sec';
SET 'pipeline.operator-chaining.enabled' = 'false';
CREATE TABLE dear WITH ('connector' = 'iceberg', 'catalog-name' = 'dev', 'warehouse' = 's3a://warehouse')
AS SELECT * FROM orders WHERE cost > 100;
