CREATE TEMPORARY TABLE requests (
    at TIMESTAMP(3), address STRING, request STRING, status STRING, size INT,
    WATERMARK FOR at AS at - INTERVAL '15' SECONDS
) WITH (
    'connector' = 'datagen', 'rows-per-second' = '5', 'fields.status.values' = '200, 201, 403, 404',
    'fields.size.min' = '100', 'fields.size.max' = '10000000'
);
CREATE TABLE wrong_requests (address STRING, status STRING) WITH ('connector' = 'blackhole');
INSERT INTO wrong_requests SELECT address, status FROM requests WHERE status SIMILAR TO '4[0-9][0-9]';
