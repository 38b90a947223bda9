"""Registers the decoder. Imports no torch."""

from clipx.data.decoders import Decoder, register_decoder

GPU = Decoder(name="gpu", reader="clipx.extra.gpu_decode.reader:EncodedReader", device_type="cuda", by="nvJPEG")

register_decoder(GPU)
