"""Sources in C++ and CUDA, and how they are built."""
