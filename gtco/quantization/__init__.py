"""A post-training quantizer: a float32 model and some samples become ONNX with QuantizeLinear and
DequantizeLinear around the products by constant weights.

One library does most of the work (``insertion.py``): the float model in which every such product is
there twice, in float and quantized, with scales, zero points and the choice between the two as
inputs. So observing, choosing ranges and asking what each layer alone costs are runs of one
library, and nothing is compiled again in between.

``quantize.py`` has the steps in order. This package compiles nothing by itself: it is given the
function that does.
"""
