CREATE TABLE visits (id INT, at TIMESTAMP(3), now AS PROCTIME())
WITH ('connector' = 'datagen', 'rows-per-second' = '5', 'fields.id.min' = '1', 'fields.id.max' = '10');
CREATE TABLE people (id INT, name STRING, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'jdbc', 'url' = 'jdbc:postgresql://db/people', 'table-name' = 'people', 'username' = 'me');
SELECT v.id, v.at, p.name FROM visits AS v JOIN people FOR SYSTEM_TIME AS OF v.now AS p ON v.id = p.id;
