-- A job that needs no files: `gpu-join run job.sql --show` shows a join while both its inputs change.

CREATE TABLE orders (                              -- 10 rows a second: new orders, corrected ones, cancelled ones
  id BIGINT, item STRING, quantity INT,
  PRIMARY KEY (id) NOT ENFORCED
) WITH (
  'connector' = 'datagen', 'rows-per-second' = '10',
  'share-of-updates' = '0.3', 'share-of-deletes' = '0.3',
  'fields.id.kind' = 'sequence',
  'fields.item.values' = 'book, pen, cup, lamp, chair',
  'fields.quantity.min' = '1', 'fields.quantity.max' = '9'
);

CREATE TABLE prices (                              -- a new price of some item every second, which changes its orders
  item STRING, price DECIMAL(6, 2),
  PRIMARY KEY (item) NOT ENFORCED
) WITH (
  'connector' = 'datagen', 'rows-per-second' = '1',
  'fields.item.values' = 'book, pen, cup, lamp, desk',
  'fields.price.min' = '1', 'fields.price.max' = '99'
);

CREATE TABLE totals WITH ('connector' = 'console');

INSERT INTO totals
SELECT o.id, o.item, o.quantity, p.price, o.quantity * p.price AS total
FROM orders o LEFT JOIN prices p ON o.item = p.item;
