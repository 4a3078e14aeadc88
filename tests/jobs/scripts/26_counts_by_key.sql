CREATE TABLE by_region (region STRING, views BIGINT, people BIGINT, PRIMARY KEY (region) NOT ENFORCED) WITH (
    'connector' = 'upsert-kafka', 'topic' = 'by_region', 'properties.bootstrap.servers' = 'broker:9092',
    'key.format' = 'json', 'value.format' = 'json'
);
CREATE TABLE views (
    person BIGINT, page BIGINT, at TIMESTAMP, region STRING, WATERMARK FOR at AS at - INTERVAL '2' SECOND
) WITH (
    'connector' = 'kafka', 'topic' = 'views', 'properties.bootstrap.servers' = 'broker:9092', 'format' = 'json'
);
SET 'state' = 'state';
SET 'checkpoint' = 'checkpoint';
INSERT INTO by_region SELECT region, COUNT(*), COUNT(DISTINCT person) FROM views GROUP BY region;
