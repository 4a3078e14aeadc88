CREATE TEMPORARY TABLE requests (
    at TIMESTAMP(3), address STRING, request STRING, status STRING, size INT,
    WATERMARK FOR at AS at - INTERVAL '15' SECONDS
) WITH (
    'connector' = 'datagen', 'rows-per-second' = '5', 'fields.status.values' = '200, 201, 403, 404',
    'fields.size.min' = '100', 'fields.size.max' = '10000000'
);
CREATE TEMPORARY TABLE minutes (begins TIMESTAMP(3), ends TIMESTAMP(3), mean BIGINT) WITH ('connector' = 'blackhole');
CREATE TEMPORARY TABLE five_minutes (begins TIMESTAMP(3), ends TIMESTAMP(3), mean BIGINT) WITH ('connector' = 'blackhole');
CREATE TEMPORARY VIEW by_minute AS
SELECT TUMBLE_START(at, INTERVAL '1' MINUTE) AS begins, TUMBLE_ROWTIME(at, INTERVAL '1' MINUTE) AS ends,
    SUM(size) AS total, COUNT(*) AS n
FROM requests GROUP BY TUMBLE(at, INTERVAL '1' MINUTE);
CREATE TEMPORARY VIEW by_five AS
SELECT TUMBLE_START(ends, INTERVAL '5' MINUTE) AS begins, TUMBLE_ROWTIME(ends, INTERVAL '5' MINUTE) AS ends,
    SUM(total) AS total, SUM(n) AS n
FROM by_minute GROUP BY TUMBLE(ends, INTERVAL '5' MINUTE);
BEGIN STATEMENT SET;
INSERT INTO minutes SELECT begins, ends, total / n AS mean FROM by_minute;
INSERT INTO five_minutes SELECT begins, ends, total / n AS mean FROM by_five;
END;
