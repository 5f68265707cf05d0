//! Whose request is next: a virtual token counter per tenant (Sheng et al., "Fairness in Serving
//! Large Language Models", OSDI 2024).
//!
//! Every tenant has a counter of service received. The waiting tenant with the least is served
//! next, its own requests first come, first served. A tenant is charged for the prompt tokens it
//! makes a replica compute, and more for tokens drawn. One that comes back from idleness is lifted
//! to the least counter of the active ones, so that idleness earns no credit.

use super::sequence::Slot;
use std::collections::{BTreeMap, HashMap};

const PROMPT_TOKEN: u64 = 1;
const DRAWN_TOKEN: u64 = 2;
/// Idle accounts that are remembered, so that their debts are; tenants are named by clients.
const IDLE_ACCOUNTS: usize = 1024;

#[derive(Debug, Default)]
pub struct Tenants {
    accounts: Vec<Option<Account>>,
    names: HashMap<String, usize>,
    idle: usize,
    waiting: usize,
}

#[derive(Debug)]
struct Account {
    name: String,
    served: u64,
    /// Requests that have not ended, waiting or not.
    open: usize,
    queue: BTreeMap<u64, Slot>,
}

impl Tenants {
    /// Counts a request in; returns its tenant's account.
    pub fn open(&mut self, name: &str) -> usize {
        let at = match self.names.get(name) {
            Some(&at) => at,
            None => self.add(name),
        };
        let active = self.accounts.iter().flatten().filter(|account| account.open > 0);
        let least = active.map(|account| account.served).min();
        if let Some(Some(account)) = self.accounts.get_mut(at) {
            if account.open == 0 {
                account.served = account.served.max(least.unwrap_or(0));
                self.idle -= 1;
            }
            account.open += 1;
        }
        at
    }

    /// Counts a request out.
    pub fn close(&mut self, at: usize) {
        let Some(Some(account)) = self.accounts.get_mut(at) else { return };
        account.open -= 1;
        if account.open == 0 {
            self.idle += 1;
            if self.idle > IDLE_ACCOUNTS {
                self.forget_one();
            }
        }
    }

    pub fn push(&mut self, at: usize, arrival: u64, slot: Slot) {
        if let Some(Some(account)) = self.accounts.get_mut(at) {
            account.queue.insert(arrival, slot);
            self.waiting += 1;
        }
    }

    pub fn remove(&mut self, at: usize, arrival: u64) {
        if let Some(Some(account)) = self.accounts.get_mut(at) {
            self.waiting -= usize::from(account.queue.remove(&arrival).is_some());
        }
    }

    pub fn next(&self) -> Option<Slot> {
        let queued = self.accounts.iter().flatten().filter(|account| !account.queue.is_empty());
        queued.min_by_key(|account| account.served)?.queue.values().next().copied()
    }

    pub fn charge_prompt(&mut self, at: usize, tokens: u32) {
        self.charge(at, PROMPT_TOKEN * u64::from(tokens));
    }

    pub fn charge_drawn(&mut self, at: usize) {
        self.charge(at, DRAWN_TOKEN);
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    pub fn queued(&self) -> impl Iterator<Item = Slot> {
        self.accounts.iter().flatten().flat_map(|account| account.queue.values().copied())
    }

    pub fn open_requests(&self) -> usize {
        self.accounts.iter().flatten().map(|account| account.open).sum()
    }

    fn charge(&mut self, at: usize, amount: u64) {
        if let Some(Some(account)) = self.accounts.get_mut(at) {
            account.served = account.served.saturating_add(amount);
        }
    }

    fn add(&mut self, name: &str) -> usize {
        let account = Account { name: name.into(), served: 0, open: 0, queue: BTreeMap::new() };
        self.idle += 1;
        let vacant = self.accounts.iter().position(Option::is_none);
        let at = vacant.unwrap_or_else(|| {
            self.accounts.push(None);
            self.accounts.len() - 1
        });
        self.accounts[at] = Some(account);
        self.names.insert(name.into(), at);
        at
    }

    /// Drops the idle account with the least debt.
    fn forget_one(&mut self) {
        let account = |at: &usize| self.accounts[*at].as_ref();
        let idle = (0..self.accounts.len()).filter(|at| account(at).is_some_and(|a| a.open == 0));
        let least = idle.min_by_key(|at| account(at).map_or(0, |a| a.served));
        if let Some(gone) = least.and_then(|at| self.accounts[at].take()) {
            self.names.remove(&gone.name);
            self.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves `rounds` requests in the order the counters say; returns tokens drawn by tenant.
    fn serve(tenants: &mut Tenants, rounds: usize, drawn: [usize; 2]) -> [usize; 2] {
        let mut served = [0, 0];
        for _ in 0..rounds {
            let slot = tenants.next().unwrap();
            let at = slot % 2;
            tenants.remove(at, slot as u64);
            tenants.charge_prompt(at, 1);
            (0..drawn[at]).for_each(|_| tenants.charge_drawn(at));
            served[at] += drawn[at];
        }
        served
    }

    #[test]
    fn a_tenant_with_many_or_long_requests_gets_no_more_than_its_share() {
        let mut tenants = Tenants::default();
        // Account 0 has all even slots, account 1 all odd ones; 0 came first, and with more.
        for slot in (0..400).step_by(2) {
            assert_eq!(tenants.open("greedy"), 0);
            tenants.push(0, slot as u64, slot);
        }
        for slot in (1..100).step_by(2) {
            assert_eq!(tenants.open("modest"), 1);
            tenants.push(1, slot as u64, slot);
        }
        let [greedy, modest] = serve(&mut tenants, 60, [40, 20]);
        assert!(greedy.abs_diff(modest) <= 2 * 40, "{greedy} and {modest} tokens");
    }

    #[test]
    fn idleness_earns_no_credit() {
        let mut tenants = Tenants::default();
        let (old, new) = (tenants.open("old"), tenants.open("new"));
        tenants.close(new);
        (0..1000).for_each(|_| tenants.charge_drawn(old));
        assert_eq!(tenants.open("new"), new);
        tenants.push(old, 1, 10);
        tenants.push(new, 2, 20);
        assert_eq!(tenants.next(), Some(10), "lifted to the same counter; the older account first");
        tenants.charge_drawn(old);
        assert_eq!(tenants.next(), Some(20));
    }

    #[test]
    fn accounts_are_bounded_whatever_names_come() {
        let mut tenants = Tenants::default();
        for i in 0..5000 {
            let at = tenants.open(&format!("tenant {i}"));
            tenants.charge_prompt(at, i);
            tenants.close(at);
        }
        assert!(tenants.accounts.len() <= IDLE_ACCOUNTS + 2);
        assert_eq!(tenants.names.len(), tenants.accounts.iter().flatten().count());
        assert_eq!(tenants.open_requests(), 0);
    }
}
