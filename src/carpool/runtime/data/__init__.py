"""Batches: sample order, datasets, prefetching and transfer to the device."""
