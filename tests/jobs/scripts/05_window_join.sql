CREATE TABLE events (
    kind INT,
    buyer ROW<id BIGINT, name VARCHAR, town VARCHAR, region VARCHAR, `at` TIMESTAMP(3)>,
    lot ROW<id BIGINT, title VARCHAR, seller BIGINT, category BIGINT, `at` TIMESTAMP(3), closes TIMESTAMP(3)>,
    offer ROW<lot BIGINT, buyer BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, `at` TIMESTAMP(3)>,
    `at` AS CASE WHEN kind = 0 THEN buyer.`at` WHEN kind = 1 THEN lot.`at` ELSE offer.`at` END,
    WATERMARK FOR `at` AS `at` - INTERVAL '4' SECOND
) WITH (
    'connector' = 'kafka', 'topic' = 'auctions', 'properties.bootstrap.servers' = 'broker:9092',
    'properties.group.id' = 'auctions', 'scan.startup.mode' = 'earliest-offset', 'sink.partitioner' = 'round-robin',
    'format' = 'json'
);
CREATE VIEW buyers AS SELECT buyer.id, buyer.name, buyer.town, buyer.region, `at` FROM events WHERE kind = 0;
CREATE VIEW lots AS
SELECT lot.id, lot.title, lot.seller, lot.category, `at`, lot.closes FROM events WHERE kind = 1;
CREATE VIEW offers AS
SELECT offer.lot, offer.buyer, offer.price, offer.channel, offer.url, `at` FROM events WHERE kind = 2;
CREATE TABLE newcomers (id BIGINT, name VARCHAR, begins TIMESTAMP(3)) WITH ('connector' = 'blackhole');
INSERT INTO newcomers
SELECT P.id, P.name, P.begins
FROM (
    SELECT id, name, window_start AS begins, window_end AS ends
    FROM TABLE(TUMBLE(TABLE buyers, DESCRIPTOR(`at`), INTERVAL '10' SECOND)) GROUP BY id, name, window_start, window_end
) P
JOIN (
    SELECT seller, window_start AS begins, window_end AS ends
    FROM TABLE(TUMBLE(TABLE lots, DESCRIPTOR(`at`), INTERVAL '10' SECOND)) GROUP BY seller, window_start, window_end
) L ON P.id = L.seller AND P.begins = L.begins AND P.ends = L.ends;
