CREATE TABLE payments (
    account BIGINT, amount BIGINT, at TIMESTAMP(3), WATERMARK FOR at AS at - INTERVAL '5' SECOND
) WITH (
    'connector' = 'kafka', 'topic' = 'payments', 'properties.bootstrap.servers' = 'kafka:9092',
    'scan.startup.mode' = 'earliest-offset', 'format' = 'csv'
);
CREATE TABLE report (account BIGINT, hour TIMESTAMP(3), amount BIGINT, PRIMARY KEY (account, hour) NOT ENFORCED) WITH (
    'connector' = 'jdbc', 'url' = 'jdbc:mysql://mysql:3306/demo', 'table-name' = 'report', 'username' = 'demo'
);
INSERT INTO report SELECT account, date_trunc('HOUR', at), SUM(amount) FROM payments GROUP BY account, date_trunc('HOUR', at);
