"""The two halves of a normalisation that is split over tasks."""
