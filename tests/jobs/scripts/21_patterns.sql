CREATE TABLE contracts (id STRING, customer INT, kind STRING, at TIMESTAMP(3))
WITH ('connector' = 'datagen', 'fields.kind.values' = 'basic, premium');
SELECT * FROM contracts MATCH_RECOGNIZE (
    PARTITION BY customer ORDER BY at MEASURES LAST(P.kind) AS kind PATTERN (P+ B)
    DEFINE P AS P.kind = 'premium', B AS B.kind = 'basic'
);
