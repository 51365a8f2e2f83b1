"""Reference models, used by the examples and the benchmarks: a decoder (GPT-2 and Llama shapes) and a ResNet."""
