CREATE TABLE claims (id INT, total FLOAT, detail VARCHAR(20), status VARCHAR(10))
WITH ('connector' = 'postgres-cdc', 'hostname' = 'db', 'table-name' = 'claims');
SELECT detail, SUM(total) AS costs FROM claims WHERE status <> 'DENIED' GROUP BY detail;
