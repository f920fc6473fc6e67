"""`raytrec index` and its search: the items whose vectors have the highest dot products with a query's."""
