"""Nexmark's join queries: an auction site's persons, auctions and bids."""
