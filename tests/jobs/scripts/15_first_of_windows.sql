CREATE TABLE sales (
    at TIMESTAMP(3), price DOUBLE, item STRING, supplier STRING, WATERMARK FOR at AS at - INTERVAL '5' SECONDS
) WITH ('connector' = 'datagen', 'fields.supplier.values' = 'Ann, Bob, Cid', 'rows-per-second' = '100');
SELECT * FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY price DESC) AS place
    FROM TABLE(TUMBLE(TABLE sales, DESCRIPTOR(at), INTERVAL '10' MINUTES))
) WHERE place <= 3;
