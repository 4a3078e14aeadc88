CREATE TEMPORARY TABLE rates (
    currency STRING, rate DECIMAL(6, 4), at TIMESTAMP(3), WATERMARK FOR at AS at - INTERVAL '15' SECOND,
    PRIMARY KEY (currency) NOT ENFORCED
) WITH (
    'connector' = 'upsert-kafka', 'topic' = 'rates', 'properties.bootstrap.servers' = 'broker:9092',
    'key.format' = 'raw', 'value.format' = 'json'
);
CREATE TEMPORARY TABLE payments (
    id STRING, currency STRING, total DECIMAL(10, 2), at TIMESTAMP(3), WATERMARK FOR at AS at - INTERVAL '30' SECOND
) WITH (
    'connector' = 'kafka', 'topic' = 'payments', 'properties.bootstrap.servers' = 'broker:9092', 'key.format' = 'raw',
    'key.fields' = 'id', 'value.format' = 'json', 'value.fields-include' = 'ALL'
);
SELECT p.id, p.total * r.rate AS euros, p.total, r.currency, p.at
FROM payments p JOIN rates FOR SYSTEM_TIME AS OF p.at AS r ON p.currency = r.currency;
