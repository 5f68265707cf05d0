//! The hash engine on every device of a node: [`Engines`] for clusters without a model.

use crate::engines::{BuildError, Engines, ModelShape};
use crate::messages::{DeviceDescription, NodeDescription};
use dunlin_model::engine::{Engine, StageSpec};
use dunlin_model::hash_engine::{HashEngine, HashSpec};
use dunlin_model::split::split_layers;

pub struct HashEngines {
    shape: HashShape,
    devices: Vec<DeviceDescription>,
}

struct HashShape(HashSpec);

impl HashEngines {
    pub fn new(spec: HashSpec, devices: Vec<DeviceDescription>) -> HashEngines {
        HashEngines { shape: HashShape(spec), devices }
    }
}

impl Engines for HashEngines {
    fn describe(&self) -> NodeDescription {
        NodeDescription {
            devices: self.devices.clone(),
            model_hash: format!("hash {:?}", self.shape.0),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }

    fn shape(&self) -> &dyn ModelShape {
        &self.shape
    }

    fn build(&self, _: &str, spec: &StageSpec) -> Result<Box<dyn Engine>, BuildError> {
        let engine = HashEngine::new(self.shape.0.clone(), spec.clone());
        Ok(Box::new(engine.map_err(|e| e.to_string())?))
    }
}

impl ModelShape for HashShape {
    fn name(&self) -> &str {
        "hash"
    }

    fn layers(&self) -> usize {
        self.0.layers
    }

    fn context(&self) -> usize {
        self.0.context
    }

    fn split_layers(&self, weights: &[f32]) -> Vec<usize> {
        split_layers(self.0.layers, weights)
    }

    fn check_ranks(&self, ranks: usize) -> Result<(), String> {
        let most = self.0.heads;
        match ranks <= most {
            true => Ok(()),
            false => Err(format!("the hash engine splits over {most} ranks")),
        }
    }

    fn stage_bytes(&self, _: &StageSpec) -> u64 {
        0
    }

    fn kv_block_bytes(&self, spec: &StageSpec) -> u64 {
        HashEngine::kv_block_bytes(&self.0, spec)
    }

    fn cache_namespace(&self) -> [u8; 16] {
        let mut namespace = [0; 16];
        let text = format!("hash {:?}", self.0);
        blake3::Hasher::new().update(text.as_bytes()).finalize_xof().fill(&mut namespace);
        namespace
    }
}
