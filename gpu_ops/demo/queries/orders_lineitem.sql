-- Orders with their lineitems, and orders that have none
SELECT o_orderkey, o_custkey, o_orderstatus, o_totalprice, o_orderdate, o_orderpriority,
    l_orderkey, l_linenumber, l_quantity, l_extendedprice, l_discount, l_shipdate, l_shipmode
FROM orders LEFT JOIN lineitem ON o_orderkey = l_orderkey
