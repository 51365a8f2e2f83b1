"""Reference models: a decoder (GPT-2 and Llama shapes), for examples and benchmarks, and a ResNet, for benchmarks."""
