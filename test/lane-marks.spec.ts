import { LaneMarks, type Look } from '@leasehold/nestjs/dist/claim/lane-marks';
import { RowGate, type TestDatabase, createTestDatabase, startLeaseApp } from './support';

const S = '"leasehold"';
const LANE = ['default', 'a'] as const;
const NOTHING = { jobs: [], positions: [], complete: true, us: 0 };

const jobsAt = (positions: number[], priority = 0) => ({
  jobs: positions.map(() => ({ queue: 'default', kind: 'a', priority })),
  positions,
});

/** [priority, position] to look after, and the priority to stop before, of each range. */
const rangesOf = (marks: LaneMarks, look: Look): [number, number, number][] => {
  const { fromPriorities, fromPositions, toPriorities } = marks.ranges([LANE], look);
  return fromPriorities.map((priority, i) => [priority, fromPositions[i]!, toPriorities[i]!]);
};

describe('the low-water marks of a lane', () => {
  it('at first nothing is known; then a claim begins after what was taken, and before it only at what may come up there', () => {
    const marks = new LaneMarks();
    expect(rangesOf(marks, 'fast')).toEqual([[-32_769, 0, 32_768]]);
    marks.saw({ ...NOTHING, ...jobsAt([7, 9, 8]), look: 'full', lanes: [LANE], xmin: 10, xid: 12 });
    // More urgent priorities, and what was given back (below zero), are looked at from their start.
    expect(rangesOf(marks, 'fast')).toEqual([
      [-32_769, 0, 0],
      [0, 9, 32_768],
    ]);
    marks.saw({ ...NOTHING, ...jobsAt([11], -5), look: 'fast', lanes: [LANE], xmin: 12, xid: 13 });
    expect(rangesOf(marks, 'fast')).toEqual([
      [-32_769, 0, -5],
      [-5, 11, 0],
      [0, 9, 32_768],
    ]);
    expect(rangesOf(marks, 'full')).toEqual([[-32_769, 0, 32_768]]);
  });

  it('the safe one waits until every transaction has ended that ran when the rows were seen', () => {
    const marks = new LaneMarks();
    const safe = () => rangesOf(marks, 'safe').at(-1)![1];
    marks.saw({ ...NOTHING, ...jobsAt([5, 6]), look: 'safe', lanes: [LANE], xmin: 100, xid: 120 });
    marks.saw({ ...NOTHING, ...jobsAt([7, 8]), look: 'safe', lanes: [LANE], xmin: 119, xid: 130 });
    expect(safe()).toBe(0);
    marks.saw({ ...NOTHING, ...jobsAt([9]), look: 'safe', lanes: [LANE], xmin: 120, xid: 140 });
    expect(safe()).toBe(6);
    // A straggler came up: what lies before it is settled, it is not.
    marks.saw({ ...NOTHING, ...jobsAt([7, 10]), look: 'safe', lanes: [LANE], xmin: 135, xid: 150 });
    expect(safe()).toBe(6);
    marks.saw({ ...NOTHING, look: 'safe', lanes: [LANE], xmin: 200, xid: 200 });
    expect(safe()).toBe(10);
  });

  it('a look that began after the safe mark, or was cut short, settles nothing', () => {
    const marks = new LaneMarks();
    marks.saw({ ...NOTHING, ...jobsAt([5]), look: 'safe', lanes: [LANE], xmin: 1, xid: 2 });
    marks.saw({ ...NOTHING, ...jobsAt([6]), look: 'fast', lanes: [LANE], xmin: 9, xid: 9 });
    marks.saw({ ...NOTHING, look: 'safe', lanes: [LANE], xmin: 9, xid: 9, complete: false });
    expect(rangesOf(marks, 'safe').at(-1)).toEqual([0, 0, 32_768]);
    expect(rangesOf(marks, 'fast').at(-1)).toEqual([0, 6, 32_768]);
  });

  it('looks further back as often as their cost allows: twenty times what they took, one from the start at most every second', () => {
    let now = 5000;
    const marks = new LaneMarks(() => now);
    const saw = (look: Look, us: number): void => marks.saw({ ...NOTHING, look, lanes: [LANE], xmin: 1, xid: 1, us });
    expect(marks.look()).toBe('full');
    saw('full', 400);
    expect(marks.look()).toBe('safe');
    saw('safe', 400);
    expect(marks.look()).toBe('safe');
    saw('safe', 10_500); // 10 ms more than usual
    expect(marks.look()).toBe('fast');
    now += 199;
    expect(marks.look()).toBe('fast');
    now += 1;
    expect(marks.look()).toBe('safe');
    now += 800;
    expect(marks.look()).toBe('full');
    saw('full', 500_500);
    now += 9999;
    expect(marks.look()).not.toBe('full');
    now += 1;
    expect(marks.look()).toBe('full');
  });

  it('keeps a bounded number of marks, those in use', () => {
    const marks = new LaneMarks();
    for (let priority = 0; priority < 100; priority++) {
      marks.saw({ ...NOTHING, ...jobsAt([priority + 1], priority), look: 'fast', lanes: [LANE], xmin: 1, xid: 1 });
    }
    expect(rangesOf(marks, 'fast').map(([priority]) => priority)).toEqual([
      -32_769,
      ...Array.from({ length: 16 }, (_, i) => 84 + i),
    ]);
  });
});

describe('claims that begin at a mark', () => {
  let db: TestDatabase;
  let marks: LaneMarks;
  const enqueue = `SELECT ${S}.enqueue_v1($1) AS ids`;
  const group = (count: number, priority = 0): string =>
    JSON.stringify([
      {
        queue: 'default',
        kind: 'a',
        priority,
        maxAttempts: 1,
        maxCrashes: 3,
        maxReleases: 3,
        payloads: Array.from({ length: count }, (_, i) => i),
      },
    ]);

  /** Claims through step_v1 as the exchange does, and settles at once. @returns the ids */
  async function claim(look: Look, want = 5): Promise<string[]> {
    const { lanes, fromPriorities, fromPositions, toPriorities } = marks.ranges([LANE], look);
    const { jobs, scan } = await db.one<{ jobs: [number, ...unknown[][]] | null; scan: string }>(
      `SELECT jobs::json, scan FROM ${S}.step_v1('w', '{}', '{}', null, 1, $1, '{default}', '{a}', $2, 0, 1000000, $3, $4, $5, $6)`,
      [want, [want], lanes, fromPriorities, fromPositions, toPriorities],
    );
    const [xmin, xid, us] = scan.split(',').map(Number);
    const rows = ((jobs ?? [0]).slice(1) as [string, string, string, number, number, ...unknown[]][]).sort(
      (a, b) => a[4] - b[4] || Number(a[12]) - Number(b[12]),
    );
    marks.saw({
      look,
      lanes: [LANE],
      jobs: rows.map((row) => ({ queue: 'default', kind: 'a', priority: row[4] })),
      positions: rows.map((row) => row[12] as number),
      complete: rows.length < want,
      xmin: xmin!,
      xid: xid!,
      us: us!,
    });
    return rows.map(([key]) => key.split(':')[0]!);
  }

  beforeAll(async () => {
    db = await createTestDatabase({ name: 'lane-marks' });
    await startLeaseApp(db, { options: { role: 'producer' } });
    await db.query(
      `INSERT INTO ${S}.workers (id, name, host, pid, version, state, kinds, concurrency, ttl_ms, incarnation, expires_at)
       VALUES ('w', 'w', 'h', 1, '0', 'live', '{a}', 1, 1, '', clock_timestamp() + interval '1 day')`,
    );
  });
  beforeEach(async () => {
    marks = new LaneMarks();
    await db.query(`DELETE FROM ${S}.ready`);
  });
  afterAll(() => db.drop());

  it('a straggler (position taken early, committed late) is claimed by the next look, however far others have got', async () => {
    const late = await RowGate.hold(db, enqueue, [group(1)]);
    const straggler = late.rows[0]!.ids;
    await db.query(enqueue, [group(40)]);
    for (let i = 0; i < 6; i++) expect(await claim('safe')).toHaveLength(5);
    await late.release();
    // The naive mark, which is where the last claim ended, has left it behind.
    expect(await claim('fast')).not.toContain(straggler);
    expect(await claim('safe')).toContain(straggler);
  });

  it('so is one that commits while the marks have long moved on past it', async () => {
    await db.query(enqueue, [group(10)]);
    for (let i = 0; i < 3; i++) await claim('safe');
    const late = await RowGate.hold(db, enqueue, [group(1)]);
    const straggler = late.rows[0]!.ids;
    for (let i = 0; i < 5; i++) {
      await db.query(enqueue, [group(5)]);
      await claim('safe');
    }
    await late.release();
    expect(await claim('safe')).toContain(straggler);
  });

  it('rows that a rival had locked and let go again are not left behind', async () => {
    await db.query(enqueue, [group(20)]);
    const rival = await RowGate.hold(
      db,
      `SELECT job_id::text FROM ${S}.ready ORDER BY position LIMIT 5 FOR UPDATE SKIP LOCKED`,
    );
    for (let i = 0; i < 3; i++) expect(await claim('safe')).toHaveLength(5);
    await rival.rollback();
    expect(await claim('safe')).toEqual(rival.rows.map((row) => row.job_id));
  });

  it('what was given back and what is more urgent comes first, in any look', async () => {
    await db.query(enqueue, [group(10)]);
    await claim('safe');
    await claim('fast', 1);
    await db.query(
      `UPDATE ${S}.ready SET position = position - 4611686018427387904 WHERE job_id = (SELECT max(job_id) FROM ${S}.ready)`,
    );
    const { last } = await db.one<{ last: string }>(`SELECT max(job_id)::text AS last FROM ${S}.ready`);
    const { ids } = await db.one<{ ids: string }>(enqueue, [group(1, -7)]);
    expect(await claim('fast', 2)).toEqual([ids, last]);
  });

  it('the safe mark follows, and a claim no longer walks over what an old snapshot keeps from being cleaned', async () => {
    const snapshot = await db.client();
    await snapshot.query('BEGIN ISOLATION LEVEL REPEATABLE READ');
    await snapshot.query('SELECT 1');
    const client = await db.client();
    const cost = async (look: Look): Promise<number> => {
      const { lanes, fromPriorities, fromPositions, toPriorities } = marks.ranges([LANE], look);
      const { rows } = await client.query<{ 'QUERY PLAN': string }>(
        `EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) SELECT r.ctid FROM unnest($1::int[], $2::bigint[], $3::int[]) AS g(p, o, t)
         CROSS JOIN LATERAL (SELECT r.ctid FROM ${S}.ready r WHERE r.queue = 'default' AND r.kind = 'a' AND NOT r.suspect
           AND (r.priority, r.position) > (g.p, g.o) AND (r.priority, r.position) < (g.t, 0)
           ORDER BY r.priority, r.position LIMIT 5) r`,
        [fromPriorities, fromPositions, toPriorities],
      );
      expect(lanes.length).toBe(fromPriorities.length);
      const plan = rows.map((row) => row['QUERY PLAN']).join('\n');
      return Number(/Buffers: shared hit=(\d+)/.exec(plan)?.[1]);
    };
    await db.query(enqueue, [group(3000)]);
    for (let i = 0; i < 28; i++) await claim('safe', 100);
    await client.query('SET enable_seqscan = off');
    await client.query('SET enable_bitmapscan = off');
    const [far, near] = [await cost('full'), await cost('safe')];
    await snapshot.query('ROLLBACK');
    await Promise.all([snapshot.end(), client.end()]);
    // Pages: 2800 dead rows lie before the first live one; of those the safe mark leaves the last claim's.
    expect(far).toBeGreaterThan(30);
    expect(near).toBeLessThan(far / 3);
  });
});
