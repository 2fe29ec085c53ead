/** A quoted schema name as it must stand inside a single-quoted literal, for nextval and the like. */
export const inLiteral = (s: string): string => s.replaceAll("'", "''");

/**
 * Always true of an id, and makes the planner expect hardly any row, so that it looks each one up by its index. Else, planning on the
 * empty tables of a new installation, it reads the other table as a whole, and keeps that plan when there is something in it.
 */
export const few = (id: string): string => `${id} BETWEEN 0 AND 9223372036854775807`;
