import type { Clients } from '../clients';
import type { Fleet, Worker } from '../fleet';
import type { Ledger } from '../ledger';
import type { Random } from '../random';
import type { Store } from '../store';
import type { Trouble } from '../trouble';

/** What a fault may work on. */
export interface Stage {
  fleet: Fleet;
  store: Store;
  trouble: Trouble;
  clients: Clients;
  ledger: Ledger;
  random: Random;
}

/** What was done, to be told when it is over: `victim` is a worker's name, or null when it is the database's, and so everybody's, trouble. */
export interface Done {
  victim: string | null;
  detail?: string;
}

/** One kind of trouble. Resolves when it is over; undefined: there was nothing to do it to. */
export type Fault = (stage: Stage) => Promise<Done | undefined>;

/** Somebody who works, if another does too: one at least goes on. */
export function anyone({ fleet, random }: Stage): Worker | undefined {
  const { up } = fleet;
  return up.length > 1 ? random.pick(up) : undefined;
}

/** The leader, or anybody when it cannot be told who that is. */
export async function leaderOf(stage: Stage): Promise<Worker | undefined> {
  const leader = await stage.fleet.leader();
  return leader && stage.fleet.up.length > 1 ? leader : anyone(stage);
}
