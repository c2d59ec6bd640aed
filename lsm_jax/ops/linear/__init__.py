"""`linear_memory`: memories whose decay is a factor per key channel times a factor per value channel."""
