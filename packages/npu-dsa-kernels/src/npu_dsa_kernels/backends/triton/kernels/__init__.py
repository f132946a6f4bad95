"""The Triton kernels, one operator a file. Importing one imports triton."""
