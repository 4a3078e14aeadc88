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
CREATE TABLE counts (buyer BIGINT, n BIGINT, begins TIMESTAMP(3)) WITH ('connector' = 'blackhole');
CREATE VIEW timed AS SELECT *, PROCTIME() AS now FROM offers;
INSERT INTO counts
SELECT buyer, count(*), window_start
FROM TABLE(TUMBLE(TABLE timed, DESCRIPTOR(now), INTERVAL '10' SECOND)) GROUP BY buyer, window_start, window_end;
