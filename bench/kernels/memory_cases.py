"""The cases of ``python -m bench memory_bound``: what lies between a vision transformer's products.

Sizes are those of ViT-B, Swin-T, SegFormer, SAM and ConvNeXt: some lie in L2, some only in L3.
"""

from __future__ import annotations

# name -> (inputs and their shapes, ONNX nodes, output y and its shape); constants are made in place
CASES: dict[str, tuple[str, str, str]] = {
    "layer_norm [3136,96]": (
        "float[1,3136,96] x, float[96] g, float[96] b",
        "y = LayerNormalization<axis=-1, epsilon=1e-5>(x, g, b)",
        "float[1,3136,96] y",
    ),
    "group_norm(1) [64,56,56]": (
        "float[1,64,56,56] x, float[64] g, float[64] b",
        "y = GroupNormalization<num_groups=1, epsilon=1e-5>(x, g, b)",
        "float[1,64,56,56] y",
    ),
    "group_norm(32) [256,64,64]": (
        "float[1,256,64,64] x, float[256] g, float[256] b",
        "y = GroupNormalization<num_groups=32, epsilon=1e-5>(x, g, b)",
        "float[1,256,64,64] y",
    ),
    "instance_norm [64,56,56]": (
        "float[1,64,56,56] x, float[64] g, float[64] b",
        "y = InstanceNormalization<epsilon=1e-5>(x, g, b)",
        "float[1,64,56,56] y",
    ),
    "layer_norm_2d [256,64,64]": (
        "float[1,256,64,64] x, float[256,1,1] g, float[256,1,1] b",
        """a = Constant<value_ints=[1]>()
        two = Constant<value_float=2.0>()
        eps = Constant<value_float=1e-6>()
        u = ReduceMean<keepdims=1>(x, a)
        d = Sub(x, u)
        s = Pow(d, two)
        v = ReduceMean<keepdims=1>(s, a)
        w = Add(v, eps)
        r = Sqrt(w)
        n = Div(d, r)
        m = Mul(n, g)
        y = Add(m, b)""",
        "float[1,256,64,64] y",
    ),
    "convnext layer_norm [96,56,56]": (
        "float[1,96,56,56] x, float[96] g, float[96] b",
        """t = Transpose<perm=[0,2,3,1]>(x)
        n = LayerNormalization<axis=-1, epsilon=1e-6>(t, g, b)
        y = Transpose<perm=[0,3,1,2]>(n)""",
        "float[1,96,56,56] y",
    ),
    "global mean NCHW [320,56,56]": (
        "float[1,320,56,56] x",
        "y = GlobalAveragePool(x)",
        "float[1,320,1,1] y",
    ),
    "mean over tokens [3136,256]": (
        "float[1,3136,256] x",
        "a = Constant<value_ints=[1]>()\n y = ReduceMean<keepdims=0>(x, a)",
        "float[1,256] y",
    ),
    "max of all [1e6]": (
        "float[1,1000000] x",
        "a = Constant<value_ints=[1]>()\n y = ReduceMax<keepdims=0>(x, a)",
        "float[1] y",
    ),
    "running sums of tokens [197,768]": (
        "float[1,197,768] x",
        "a = Constant<value_int=1>()\n y = CumSum(x, a)",
        "float[1,197,768] y",
    ),
    "running sums of rows [100,1000]": (
        "float[100,1000] x",
        "a = Constant<value_int=1>()\n y = CumSum(x, a)",
        "float[100,1000] y",
    ),
    "gather elements [100,100]": (
        "float[100,1000] x, int64[100,100] i",
        "y = GatherElements<axis=1>(x, i)",
        "float[100,100] y",
    ),
    "softmax [4,196,196]": (
        "float[4,196,196] x",
        "y = Softmax<axis=-1>(x)",
        "float[4,196,196] y",
    ),
    "softmax of tokens [8,784,16]": (
        "float[8,784,16] x",
        "y = Softmax<axis=1>(x)",
        "float[8,784,16] y",
    ),
    "softmax of tokens [3136,256]": (
        "float[1,3136,256] x",
        "y = Softmax<axis=1>(x)",
        "float[1,3136,256] y",
    ),
    "softmax of 4 long rows": (
        "float[4,50176] x",
        "y = Softmax<axis=-1>(x)",
        "float[4,50176] y",
    ),
    "softmax of 1 long row": (
        "float[1,200704] x",
        "y = Softmax<axis=-1>(x)",
        "float[1,200704] y",
    ),
    "layer_norm of 1 long row": (
        "float[1,200704] x, float[200704] g, float[200704] b",
        "y = LayerNormalization<axis=-1, epsilon=1e-5>(x, g, b)",
        "float[1,200704] y",
    ),
    "se gate [96,56,56]": (
        "float[1,96,56,56] x, float[1,96,1,1] s",
        "g = Sigmoid(s)\n y = Mul(x, g)",
        "float[1,96,56,56] y",
    ),
    "silu [1e6]": (
        "float[1024,1024] x",
        "s = Sigmoid(x)\n y = Mul(x, s)",
        "float[1024,1024] y",
    ),
    "gelu [1e6]": (
        "float[1024,1024] x",
        "y = Gelu(x)",
        "float[1024,1024] y",
    ),
    "swiglu [257,2x1024]": (
        "float[1,257,2048] x",
        "a, b = Split<axis=-1, num_outputs=2>(x)\n s = Sigmoid(a)\n t = Mul(a, s)\n y = Mul(t, b)",
        "float[1,257,1024] y",
    ),
    "window partition [56,56,96]": (
        "float[1,56,56,96] x",
        """s = Constant<value_ints=[1,8,7,8,7,96]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,3,2,4,5]>(r)
        z = Constant<value_ints=[64,49,96]>()
        y = Reshape(t, z)""",
        "float[64,49,96] y",
    ),
    "roll [56,56,96]": (
        "float[1,56,56,96] x",
        """b0 = Constant<value_ints=[3]>()
        e0 = Constant<value_ints=[56]>()
        z0 = Constant<value_ints=[0]>()
        h = Constant<value_ints=[1]>()
        w = Constant<value_ints=[2]>()
        p = Slice(x, b0, e0, h)
        q = Slice(x, z0, b0, h)
        u = Concat<axis=1>(p, q)
        m = Slice(u, b0, e0, w)
        n = Slice(u, z0, b0, w)
        y = Concat<axis=2>(m, n)""",
        "float[1,56,56,96] y",
    ),
    "NCHW to NHWC [64,56,56]": (
        "float[1,64,56,56] x",
        "y = Transpose<perm=[0,2,3,1]>(x)",
        "float[1,56,56,64] y",
    ),
    "NHWC to NCHW [56,56,96]": (
        "float[1,56,56,96] x",
        "y = Transpose<perm=[0,3,1,2]>(x)",
        "float[1,96,56,56] y",
    ),
    "image to NHWC + relu [3,224,224]": (
        "float[1,3,224,224] x",
        "t = Transpose<perm=[0,2,3,1]>(x)\n y = Relu(t)",
        "float[1,224,224,3] y",
    ),
    "heads [197,12,64]": (
        "float[1,197,12,64] x",
        "y = Transpose<perm=[0,2,1,3]>(x)",
        "float[1,12,197,64] y",
    ),
    "keys [12,197,64] transposed": (
        "float[1,12,197,64] x",
        "y = Transpose<perm=[0,1,3,2]>(x)",
        "float[1,12,64,197] y",
    ),
    "transpose + add [3136,96]": (
        "float[1,3136,96] x, float[1,96,3136] z",
        "t = Transpose<perm=[0,2,1]>(x)\n y = Add(t, z)",
        "float[1,96,3136] y",
    ),
    "pixel shuffle [64,56,56]": (
        "float[1,64,56,56] x",
        'y = DepthToSpace<blocksize=2, mode="CRD">(x)',
        "float[1,16,112,112] y",
    ),
    "pixel unshuffle [16,112,112]": (
        "float[1,16,112,112] x",
        "y = SpaceToDepth<blocksize=2>(x)",
        "float[1,64,56,56] y",
    ),
    "patch merging [56,56,96]": (
        "float[1,56,56,96] x",
        """s = Constant<value_ints=[1,28,2,28,2,96]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,3,4,2,5]>(r)
        z = Constant<value_ints=[1,784,384]>()
        y = Reshape(t, z)""",
        "float[1,784,384] y",
    ),
    "concat channels [64+64,56,56]": (
        "float[1,64,56,56] x, float[1,64,56,56] z",
        "y = Concat<axis=1>(x, z)",
        "float[1,128,56,56] y",
    ),
    "concat last axis [3136,64+32]": (
        "float[1,3136,64] x, float[1,3136,32] z",
        "y = Concat<axis=2>(x, z)",
        "float[1,3136,96] y",
    ),
    "concat odd last axis [3136,63+30]": (
        "float[1,3136,63] x, float[1,3136,30] z",
        "y = Concat<axis=2>(x, z)",
        "float[1,3136,93] y",
    ),
    "channel shuffle NCHW [64,56,56]": (
        "float[1,64,56,56] x",
        """s = Constant<value_ints=[1,2,32,56,56]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,2,1,3,4]>(r)
        z = Constant<value_ints=[1,64,56,56]>()
        y = Reshape(t, z)""",
        "float[1,64,56,56] y",
    ),
    "channel shuffle NHWC [56,56,64]": (
        "float[1,56,56,64] x",
        """s = Constant<value_ints=[1,56,56,2,32]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,2,4,3]>(r)
        z = Constant<value_ints=[1,56,56,64]>()
        y = Reshape(t, z)""",
        "float[1,56,56,64] y",
    ),
    "rotary [12,197,64]": (
        "float[1,12,197,64] x, float[197,64] c, float[197,64] s",
        """a, b = Split<axis=-1, num_outputs=2>(x)
        m = Neg(b)
        r = Concat<axis=-1>(m, a)
        p = Mul(x, c)
        q = Mul(r, s)
        y = Add(p, q)""",
        "float[1,12,197,64] y",
    ),
    "rotary interleaved [12,197,64]": (
        "float[1,12,197,64] x, float[197,64] c, float[197,64] s",
        """h = Constant<value_ints=[1,12,197,32,2]>()
        v = Reshape(x, h)
        one = Constant<value_int=1>()
        zero = Constant<value_int=0>()
        b = Gather<axis=4>(v, one)
        a = Gather<axis=4>(v, zero)
        m = Neg(b)
        ax = Constant<value_ints=[4]>()
        mu = Unsqueeze(m, ax)
        au = Unsqueeze(a, ax)
        st = Concat<axis=4>(mu, au)
        f = Constant<value_ints=[1,12,197,64]>()
        r = Reshape(st, f)
        p = Mul(x, c)
        q = Mul(r, s)
        y = Add(p, q)""",
        "float[1,12,197,64] y",
    ),
    "add [197,768]": (
        "float[1,197,768] x, float[1,197,768] z",
        "y = Add(x, z)",
        "float[1,197,768] y",
    ),
    "residual + scale [4096,256]": (
        "float[1,4096,256] x, float[1,4096,256] z, float[256] g",
        "m = Mul(z, g)\n y = Add(x, m)",
        "float[1,4096,256] y",
    ),
    "layer_norm [197,768]": (
        "float[1,197,768] x, float[768] g, float[768] b",
        "y = LayerNormalization<axis=-1, epsilon=1e-5>(x, g, b)",
        "float[1,197,768] y",
    ),
    "layer_norm [16,65536]": (
        "float[16,65536] x, float[65536] g, float[65536] b",
        "y = LayerNormalization<axis=-1, epsilon=1e-5>(x, g, b)",
        "float[16,65536] y",
    ),
    "rms_norm [257,1024]": (
        "float[1,257,1024] x, float[1024] g",
        """two = Constant<value_float=2.0>()
        a = Constant<value_ints=[-1]>()
        eps = Constant<value_float=1e-6>()
        s = Pow(x, two)
        v = ReduceMean<keepdims=1>(s, a)
        w = Add(v, eps)
        r = Sqrt(w)
        n = Div(x, r)
        y = Mul(n, g)""",
        "float[1,257,1024] y",
    ),
    "batch_norm + relu [64,56,56]": (
        "float[1,64,56,56] x, float[64] g, float[64] b, float[64] m, float[64] v",
        "a = Abs(v)\n n = BatchNormalization<epsilon=1e-5>(x, g, b, m, a)\n y = Relu(n)",
        "float[1,64,56,56] y",
    ),
    "softmax [12,197,197]": (
        "float[12,197,197] x",
        "y = Softmax<axis=-1>(x)",
        "float[12,197,197] y",
    ),
    "softmax [3136,49]": (
        "float[3136,49] x",
        "y = Softmax<axis=-1>(x)",
        "float[3136,49] y",
    ),
    "where [12,197,197]": (
        "float[1,12,197,197] x, bool[1,1,197,197] k",
        "n = Constant<value_float=-1e9>()\n y = Where(k, x, n)",
        "float[1,12,197,197] y",
    ),
    "mean of rows [3136,96]": (
        "float[1,3136,96] x",
        "a = Constant<value_ints=[2]>()\n y = ReduceMean<keepdims=1>(x, a)",
        "float[1,3136,1] y",
    ),
    "sum over batch [8,784,96]": (
        "float[8,784,96] x",
        "a = Constant<value_ints=[0]>()\n y = ReduceSum<keepdims=0>(x, a)",
        "float[784,96] y",
    ),
    "argmax of classes [150,64,64]": (
        "float[1,150,64,64] x",
        "y = ArgMax<axis=1, keepdims=0>(x)",
        "int64[1,64,64] y",
    ),
    "window reverse [56,56,96]": (
        "float[64,49,96] x",
        """s = Constant<value_ints=[1,8,8,7,7,96]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,3,2,4,5]>(r)
        z = Constant<value_ints=[1,56,56,96]>()
        y = Reshape(t, z)""",
        "float[1,56,56,96] y",
    ),
    "patch merging by slices [56,56,96]": (
        "float[1,56,56,96] x",
        """z = Constant<value_ints=[0,0]>()
        e = Constant<value_ints=[56,56]>()
        a = Constant<value_ints=[1,2]>()
        t = Constant<value_ints=[2,2]>()
        b1 = Constant<value_ints=[1,0]>()
        b2 = Constant<value_ints=[0,1]>()
        b3 = Constant<value_ints=[1,1]>()
        p = Slice(x, z, e, a, t)
        q = Slice(x, b1, e, a, t)
        r = Slice(x, b2, e, a, t)
        s = Slice(x, b3, e, a, t)
        y = Concat<axis=3>(p, q, r, s)""",
        "float[1,28,28,384] y",
    ),
    "slice of columns by 2 [3136,128]": (
        "float[1,3136,128] x",
        """z = Constant<value_ints=[0]>()
        e = Constant<value_ints=[128]>()
        a = Constant<value_ints=[2]>()
        t = Constant<value_ints=[2]>()
        y = Slice(x, z, e, a, t)""",
        "float[1,3136,64] y",
    ),
    "pad to windows [60,60,96]": (
        "float[1,60,60,96] x",
        "p = Constant<value_ints=[0,0,0,0,0,3,3,0]>()\n y = Pad(x, p)",
        "float[1,63,63,96] y",
    ),
    "pad NCHW [64,56,56]": (
        "float[1,64,56,56] x",
        "p = Constant<value_ints=[0,0,1,1,0,0,1,1]>()\n y = Pad(x, p)",
        "float[1,64,58,58] y",
    ),
    "class token [1+196,768]": (
        "float[1,1,768] c, float[1,196,768] x, float[1,197,768] p",
        "t = Concat<axis=1>(c, x)\n y = Add(t, p)",
        "float[1,197,768] y",
    ),
    "split columns [3136,3x96]": (
        "float[1,3136,288] x",
        "a, b, c = Split<axis=-1, num_outputs=3>(x)\n s = Add(a, b)\n y = Mul(s, c)",
        "float[1,3136,96] y",
    ),
    "merge heads [12,197,64]": (
        "float[1,12,197,64] x",
        """t = Transpose<perm=[0,2,1,3]>(x)
        z = Constant<value_ints=[1,197,768]>()
        y = Reshape(t, z)""",
        "float[1,197,768] y",
    ),
    "resize bilinear [64,56,56]": (
        "float[1,64,56,56] x",
        """s = Constant<value_floats=[1.0,1.0,2.0,2.0]>()
        y = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(x, , s)""",
        "float[1,64,112,112] y",
    ),
    "resize nearest [64,56,56]": (
        "float[1,64,56,56] x",
        """s = Constant<value_floats=[1.0,1.0,2.0,2.0]>()
        y = Resize<mode="nearest", coordinate_transformation_mode="asymmetric",
        nearest_mode="floor">(x, , s)""",
        "float[1,64,112,112] y",
    ),
    "max pool [64,112,112]": (
        "float[1,64,112,112] x",
        "y = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)",
        "float[1,64,56,56] y",
    ),
    "average pool [64,112,112]": (
        "float[1,64,112,112] x",
        "y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)",
        "float[1,64,56,56] y",
    ),
}
