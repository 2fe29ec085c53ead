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
    return name;
  };

export const cutPool = terminate('^leasehold$');
export const cutBeat = terminate('^lh:');
export const cutMain = terminate('^leasehold main$');
export const cutEffect = terminate('^chaos effect$');

export const crashServer: Fault = async ({ postgres }) => {
  await postgres.restart('immediate');
  return 'immediate';
};

export const restartServer: Fault = async ({ postgres }) => {
  await postgres.restart('fast');
  return 'fast';
};
