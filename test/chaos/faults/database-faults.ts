import { setTimeout as sleep } from 'node:timers/promises';
import { TTL_MS } from '../settings';
import type { Fault } from './fault';

const terminate =
  (names: string): Fault =>
  async ({ ledger, random }) => {
    const rows = await ledger
      .read<{ pid: number; name: string }>(
        `SELECT pid, application_name AS name FROM pg_stat_activity WHERE application_name ~ $1 AND pid <> pg_backend_pid() ORDER BY pid`,
        [names],
      )
      .catch(() => []);
    if (rows.length === 0) return undefined;
    const { pid, name } = random.pick(rows);
    await ledger.read(`SELECT pg_terminate_backend($1)`, [pid]).catch(() => undefined);
    return { victim: null, detail: name };
  };

export const endPool = terminate('^leasehold$');
export const endBeatSession = terminate('^lh:');
export const endMain = terminate('^leasehold main$');
export const endEffect = terminate('^chaos effect$');

export const crashServer: Fault = async ({ store }) => {
  await store.restart('immediate');
  return { victim: null };
};

export const restartServer: Fault = async ({ store }) => {
  await store.restart('fast');
  return { victim: null };
};

/** Errors that a server gives when it has to, on every third write of a lease or so: conflicts, time-outs, no memory, no disk. */
export const errors: Fault = async ({ trouble, random }) => {
  const code = random.pick(['40001', '40P01', '55P03', '57014', '53200', '53100', '25006']);
  const ms = random.int(300, TTL_MS);
  await trouble.inject(code, 0.3, ms);
  return { victim: null, detail: `${code} for ${ms} ms` };
};

/** Somebody has rows of leases and of ready jobs locked. */
export const rowLocks: Fault = async ({ trouble, random }) => {
  const ms = random.int(300, TTL_MS);
  await trouble.lockRows(random.int(1, 20), ms);
  return { victim: null, detail: `${ms} ms` };
};

/** Somebody has a whole table locked, as a careless ALTER TABLE does. */
export const tableLock: Fault = async ({ trouble, random }) => {
  const [table, ms] = [random.pick(['jobs', 'leases', 'ready', 'workers', 'batches']), random.int(100, 1500)];
  await trouble.lockTable(table, ms);
  return { victim: null, detail: `${table} for ${ms} ms` };
};

/** Sessions become read-only, as on a server that has been demoted. */
export const readOnly: Fault = async ({ trouble, random }) => {
  const ms = random.int(300, TTL_MS);
  await trouble.readOnly(ms);
  return { victim: null, detail: `${ms} ms` };
};

/** No connection is left for anybody. */
export const crowd: Fault = async ({ trouble, random }) => {
  const ms = random.int(500, TTL_MS);
  const taken = await trouble.crowd(ms);
  return { victim: null, detail: `${taken} connections for ${ms} ms` };
};

/** No disk is left for tables. */
export const diskFull: Fault = async ({ store, trouble, random }) => {
  const ms = random.int(300, TTL_MS);
  if (!store.fillDisk) await trouble.inject('53100', 1, ms);
  else await store.fillDisk(() => sleep(ms));
  return { victim: null, detail: `${store.fillDisk ? 'a full file system' : 'injected 53100'} for ${ms} ms` };
};

/** The newer half of a deploy has migrated: a column and a record that the code does not know. */
export const newerSchema: Fault = async ({ ledger, random }) => {
  const name = `Newer${random.int(1, 1_000_000)}`;
  await ledger
    .read(`ALTER TABLE leasehold.jobs ADD COLUMN IF NOT EXISTS ${name.toLowerCase()} text`)
    .then(() => ledger.read(`INSERT INTO leasehold.migrations (timestamp, name) VALUES (9999999999999, $1)`, [name]))
    .catch(() => undefined);
  return { victim: null, detail: name };
};
