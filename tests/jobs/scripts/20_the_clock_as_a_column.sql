CREATE TABLE orders (id INT, at AS CURRENT_TIMESTAMP, WATERMARK FOR at AS at - INTERVAL '5' SECONDS)
WITH ('connector' = 'datagen', 'rows-per-second' = '10', 'fields.id.min' = '1', 'fields.id.max' = '100');
SELECT id, at FROM (SELECT id, at, ROW_NUMBER() OVER (PARTITION BY id ORDER BY at) AS n FROM orders) WHERE n = 1;
