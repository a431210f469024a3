"""The first measurements on a GPU, in parts of rows; see scripts/gpu_first_contact.py."""
