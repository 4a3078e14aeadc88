CREATE TABLE bids (at TIMESTAMP(3), price DECIMAL(10, 2), item STRING, WATERMARK FOR at AS at - INTERVAL '1' SECOND)
WITH ('connector' = 'datagen', 'fields.item.values' = 'A, B, C');
SELECT window_start, window_end, SUM(price) AS total
FROM CUMULATE(TABLE bids, DESCRIPTOR(at), INTERVAL '2' MINUTES, INTERVAL '10' MINUTES) GROUP BY window_start, window_end;
