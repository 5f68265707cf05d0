//! KV block manager: which block of the shards' KV stores holds which tokens of which sequence.
//!
//! [`Kv`] is the pure core; it moves no data. It hands out block tables, counts references, finds
//! cached prefixes, plans copy-on-write, and evicts. The scheduler asks; the shards obey the tables
//! they are sent. [`Chain`] names blocks alike in every process.
//!
//! Knows nothing of requests, steps, devices or time.

mod actor;
mod audit;
mod core;
mod events;
pub mod key;
#[cfg(test)]
mod naive;
mod pool;
#[cfg(test)]
mod tests;

pub use self::core::{Copies, Kv, KvConfig, KvError, KvUsage, TableId};
pub use actor::{KvArgs, SharedKv, start_kv};
pub use key::{Chain, KEY_SCHEMA, Scope};
pub use pool::BlockId;
