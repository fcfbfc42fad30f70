"""Job descriptions without torch: job files, programs, entry checks, devices and host resources."""
