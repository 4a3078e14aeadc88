-- A job in a file: `gpu-join run examples/job.sql --once` reads the files in data/ and prints what the join makes of them.

CREATE TABLE orders (
  id BIGINT, item STRING, quantity INT,
  PRIMARY KEY (id) NOT ENFORCED                    -- a later row of the same id replaces the earlier one
) WITH ('connector' = 'json', 'path' = 'data/orders', 'reader' = 'arrow');

CREATE TABLE prices (
  op STRING, item STRING, price DOUBLE
) WITH ('connector' = 'json', 'path' = 'data/prices', 'reader' = 'arrow', 'row_kind' = 'op');

CREATE TABLE totals (id BIGINT, item STRING, total DOUBLE)
WITH ('connector' = 'console');

INSERT INTO totals
SELECT o.id, o.item, o.quantity * p.price
FROM orders o LEFT JOIN prices p ON o.item = p.item;
