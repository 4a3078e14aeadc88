-- Winning bids: its join, without the choice of the highest bid
SELECT
    A.id, A.itemName, A.description, A.initialBid, A.reserve, A.dateTime, A.expires, A.seller, A.category, A.extra,
    B.auction, B.bidder, B.price, B.dateTime AS bid_dateTime, B.extra AS bid_extra
FROM auction AS A
INNER JOIN bid AS B ON A.id = B.auction
WHERE B.dateTime BETWEEN A.dateTime AND A.expires
