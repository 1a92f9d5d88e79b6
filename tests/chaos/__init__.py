"""Trainings that are killed, stopped and resized at drawn moments must end as if they had been left alone."""
