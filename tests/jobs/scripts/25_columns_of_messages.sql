CREATE TABLE clicks (
    at TIMESTAMP_LTZ(3) METADATA FROM 'timestamp', `partition` BIGINT METADATA VIRTUAL, `offset` BIGINT METADATA VIRTUAL,
    person BIGINT, item BIGINT, what STRING
) WITH (
    'connector' = 'kafka', 'topic' = 'clicks', 'properties.bootstrap.servers' = 'broker:9092',
    'properties.group.id' = 'test', 'scan.startup.mode' = 'earliest-offset', 'format' = 'json'
);
SELECT * FROM clicks;
