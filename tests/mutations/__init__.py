"""Mutation testing of `verify`: mistakes are planted in this package's code one by one, and each must be found."""
