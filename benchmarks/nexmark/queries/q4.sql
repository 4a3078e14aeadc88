-- Average price for a category: its join, without the two aggregates above it
SELECT A.id, A.category, B.price
FROM auction AS A
INNER JOIN bid AS B ON A.id = B.auction
WHERE B.dateTime BETWEEN A.dateTime AND A.expires
