CREATE TABLE orders (id STRING, cost FLOAT) WITH (
    'connector' = 'kafka', 'topic' = 'orders', 'properties.bootstrap.servers' = 'broker:9092', 'format' = 'json'
);
CREATE CATALOG lake WITH ('type' = 'delta-catalog', 'catalog-type' = 'in-memory');
CREATE DATABASE lake.one;
CREATE TABLE lake.one.cheap WITH ('connector' = 'delta', 'table-path' = 's3a://warehouse/orders')
AS SELECT * FROM orders WHERE cost < 100;
