//! A mixture of experts without the host: a kernel turns the router's row into shares, zero for
//! experts not chosen; then every expert runs over all rows, skips those without a share, and adds
//! its share in ascending order. In fast mode products take int8 as others do: the rows are rounded
//! once for all experts, and what lies between an expert's products once for each.

use crate::backend::{Bias, Input, Mix, WgpuBackend, linear_part};
use crate::kernels::Kernel;
use crate::pack::WgpuWeight;
use crate::packed;
use crate::record::Recorder;
use crate::tensor::{WgpuTensor, same, shape, word};
use dunlin_backend::{BackendError, Experts};

/// Activations between the products, made at first use for the capacity of a caller's tensors.
#[derive(Default)]
pub(crate) struct Scratch {
    tensors: Option<[WgpuTensor; 3]>,
    /// What lies between the products, as int8.
    inner: packed::Scratch,
}

pub(crate) fn run(
    backend: &WgpuBackend,
    rec: &mut Recorder,
    (scratch, outer): (&mut Scratch, &mut packed::Scratch),
    x: &WgpuTensor,
    router: &WgpuTensor,
    experts: &Experts<'_, WgpuBackend>,
    out: &mut WgpuTensor,
) -> Result<(), BackendError> {
    const OP: &str = "experts";
    let count = experts.gate.len();
    same(OP, "columns of the router", router.cols, count)?;
    same(OP, "rows of the router", router.rows, x.rows)?;
    same(OP, "ups", experts.up.len(), count)?;
    same(OP, "downs", experts.down.len(), count)?;
    same(OP, "columns of out", out.cols, x.cols)?;
    if !(1..=count).contains(&experts.top_k) {
        return Err(shape(OP, format!("top {} of {count} experts", experts.top_k)));
    }
    out.set_rows(OP, x.rows)?;
    let ffn = experts.gate[0].layout.rows;
    let Scratch { tensors, inner } = scratch;
    let [gate, up, shares] = room(tensors, backend, x.capacity, ffn, count)?;
    for t in [&mut *gate, &mut *up, &mut *shares] {
        t.set_rows(OP, x.rows)?;
    }
    rec.begin(0)?;
    let params = [
        word(x.rows),
        word(count),
        word(router.stride),
        word(experts.top_k),
        u32::from(experts.normalise),
    ];
    let size = (word(x.rows).div_ceil(32), 1);
    rec.dispatch(Kernel::Route, &[&router.buffer], &[&shares.buffer], &params, size)?;
    backend.flat(rec, Kernel::Clear, &backend.nothing, out)?;
    let bytes = |w: &WgpuWeight| backend.multiplies_bytes() && w.is_quantised();
    let packed = match experts.gate.iter().chain(experts.up).any(bytes) {
        true => Some(outer.of(&backend.gpu, rec, x)?),
        false => None,
    };
    for e in 0..count {
        let mix = |accumulate| Some(Mix { shares, expert: e, accumulate });
        let none = Bias::None;
        let input = Input { x, packed };
        linear_part(backend, rec, input, &experts.gate[e], none, mix(false), gate)?;
        linear_part(backend, rec, input, &experts.up[e], none, mix(false), up)?;
        backend.flat(rec, WgpuBackend::gate_kernel(experts.activation), &up.buffer, gate)?;
        let packed = match bytes(&experts.down[e]) {
            true => Some(inner.of(&backend.gpu, rec, gate)?),
            false => None,
        };
        let input = Input { x: gate, packed };
        linear_part(backend, rec, input, &experts.down[e], none, mix(true), out)?;
    }
    Ok(())
}

/// Gate, up and shares.
fn room<'a>(
    made: &'a mut Option<[WgpuTensor; 3]>,
    backend: &WgpuBackend,
    capacity: usize,
    ffn: usize,
    experts: usize,
) -> Result<&'a mut [WgpuTensor; 3], BackendError> {
    let fits =
        |t: &[WgpuTensor; 3]| t[0].capacity >= capacity && t[0].cols == ffn && t[2].cols == experts;
    if !made.as_ref().is_some_and(fits) {
        let make = |cols| WgpuTensor::new(&backend.gpu, capacity, cols);
        *made = Some([make(ffn)?, make(ffn)?, make(experts)?]);
    }
    made.as_mut().ok_or_else(|| backend.gpu.lost("no scratch"))
}
