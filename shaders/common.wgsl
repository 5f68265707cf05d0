// Functions that several kernels share. The text is put before a kernel's own (backends/wgpu/src/kernels.rs).

// e^x to about 1 ulp for x <= 88; 0 below -87. Cephes' expf: adapters differ in their own exp.
fn exp_(x: f32) -> f32 {
    let c = clamp(x, -87.0, 88.0);
    let n = floor(fma(c, 1.44269504088896341, 0.5));
    let r = fma(n, 2.12194440e-4, fma(n, -0.693359375, c));
    var p = fma(1.9875691500e-4, r, 1.3981999507e-3);
    p = fma(p, r, 8.3334519073e-3);
    p = fma(p, r, 4.1665795894e-2);
    p = fma(p, r, 1.6666665459e-1);
    p = fma(p, r, 5.0000001201e-1);
    let y = fma(p, r * r, r) + 1.0;
    return select(y * bitcast<f32>(u32(i32(n) + 127) << 23u), 0.0, x < -87.0);
}

fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp_(-x));
}

// tanh(x) = 2 sigmoid(2x) - 1; only used where its absolute error matters.
fn tanh_(x: f32) -> f32 {
    return fma(2.0, sigmoid(2.0 * x), -1.0);
}
